"""Starts a Kafka broker whose settings are KAFKA_… of the environment, as in the image apache/kafka.

Invariant: this process becomes the broker; its records lie in /tmp and end with the container.
"""

import os
import subprocess
from pathlib import Path

JAVA = [f"{os.environ['JAVA_HOME']}/bin/java", "-Xmx512m", "-XX:+UseSerialGC", "-cp", "/opt/kafka/*"]


def main() -> None:
    given = {name[6:].lower().replace("_", "."): value for name, value in os.environ.items() if name[:6] == "KAFKA_"}
    file = Path("/tmp/server.properties")
    file.write_text("".join(f"{key}={value}\n" for key, value in {"log.dirs": "/tmp/kafka", **given}.items()))
    format = [*JAVA, "kafka.tools.StorageTool", "format", "-t", "joinmeshAAAAAAAAAAAAAA", "-c", str(file)]
    subprocess.run(format, check=True)
    os.execv(JAVA[0], [*JAVA, "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "kafka.Kafka", str(file)])


if __name__ == "__main__":
    main()
