#!/opt/joinmesh/venv/bin/python
"""`spark-submit` without a shell: asks Spark's own launcher for the Java command line and becomes that process.

It stands in an image at the place of Spark's scripts, which want bash. Invariant: the command line is the one that
Spark itself builds from its arguments and settings; nothing is added but what `spark-submit` adds.
"""

import os
import subprocess
import sys
from pathlib import Path


def main() -> None:
    home = Path(__file__).resolve().parent.parent
    java = str(Path(os.environ["JAVA_HOME"], "bin", "java"))
    environment = {
        "PYTHONHASHSEED": "0",
        "SPARK_SCALA_VERSION": "2.13",
        "SPARK_CONF_DIR": str(home / "conf"),
        **os.environ,
        "SPARK_HOME": str(home),
    }
    launcher = [java, "-Xmx128m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-cp", f"{home}/jars/*"]
    asked = [*launcher, "org.apache.spark.launcher.Main", "org.apache.spark.deploy.SparkSubmit", *sys.argv[1:]]
    done = subprocess.run(asked, env=environment, stdout=subprocess.PIPE, check=False)
    said, _, command = done.stdout.partition(b"\0\n")
    if done.returncode != 0 or not command:
        sys.stderr.write(said.decode(errors="replace"))
        raise SystemExit(done.returncode or 1)
    words = command.decode().split("\0")[:-1]
    os.execve(words[0], words, environment)


if __name__ == "__main__":
    main()
