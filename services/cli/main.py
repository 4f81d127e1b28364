"""`joinmesh COMMAND …`: finds the command, runs it, and turns every expected failure into one line on stderr.

Invariant: exit code 0 means done, 1 failed, 2 wrong usage, 130 interrupted. A traceback is shown only with --debug or
for a bug of ours. Nothing heavy is imported before the command is known: `joinmesh --help` answers at once.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from schemas.errors import JoinmeshError

COMMANDS = {
    "demo": "a small shop, end to end: broker, events, joins, audit",
    "broker": "a real Kafka broker on this machine, for trying things out",
    "topics": "the mesh's topics: list, check, create",
    "acls": "the rights that each service needs at Kafka: list, grant",
    "up": "run all services of a mesh in the foreground",
    "migrate": "change the plan of a query while it runs",
    "status": "what the services last said about themselves",
    "check": "does a running mesh work, from end to end?",
    "feedback": "what joins tell one another not to make, live",
    "explain": "the plan of each query: tree, keys, topics, expected state",
    "generate": "write reproducible sample events to the source topics",
    "audit": "prove the results right with Spark",
    "chaos": "faults on a mesh under load, then an audit",
}
_EXAMPLES = """examples:
  joinmesh demo                              see it all work, in about a minute
  joinmesh broker up                         a broker on localhost:9092
  joinmesh generate -f mesh.yaml --create 4  sample events for your streams
  joinmesh up -f mesh.yaml                   join until Ctrl-C
  joinmesh audit -f mesh.yaml                compare the results with Spark's

`joinmesh COMMAND --help` explains a command."""


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    debug = "--debug" in arguments
    try:
        args = _parser(arguments).parse_args(arguments)
        code = args.run(args)
        sys.stdout.flush()
        return int(code)
    except JoinmeshError as error:
        if debug:
            raise
        _fail(_hidden(str(error)))
        return 1
    except KeyboardInterrupt:
        _fail("interrupted")
        return 130
    except BrokenPipeError:  # `joinmesh status | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except SystemExit as exit:  # argparse: usage errors and --help
        return int(exit.code) if isinstance(exit.code, int) else 2
    except Exception as error:
        line = None if debug else _said_by_kafka(error, args)
        if line is None:
            raise
        _fail(line)
        return 1


def _fail(line: str) -> None:
    """The last line of what a command says, also where both streams go to one place."""
    sys.stdout.flush()
    print(f"joinmesh: {line}", file=sys.stderr)


def _hidden(text: str) -> str:
    from services.runtime.security.secrets import hide

    return hide(text)


def _said_by_kafka(error: Exception, args: argparse.Namespace) -> str | None:
    """A line for what a Kafka client raised; None for anything else."""
    from confluent_kafka import KafkaException

    from schemas.mesh import load_mesh
    from services.runtime.security.refusals import said_by_kafka

    if not isinstance(error, KafkaException) or not hasattr(args, "file"):
        return None
    return _hidden(said_by_kafka(load_mesh(args.file), error))


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """Every command's name and sentence, but the options only of the one that is asked for."""
    parser = argparse.ArgumentParser(
        prog="joinmesh",
        description="Joins event streams that live in Kafka.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=_version() if "--version" in arguments else "")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    asked = next((word for word in arguments if not word.startswith("-")), None)
    for name, sentence in COMMANDS.items():
        if name != asked:
            commands.add_parser(name, help=sentence)
            continue
        module = importlib.import_module(f"services.cli.{name}")
        one = commands.add_parser(
            name,
            help=sentence,
            description=(module.__doc__ or "").partition("\n")[0],
            epilog=module.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        one.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks")
        module.add_arguments(one)
        one.set_defaults(run=module.run)
    return parser


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"joinmesh {version('joinmesh')}"
    except PackageNotFoundError:
        return "joinmesh (not installed)"


if __name__ == "__main__":
    sys.exit(main())
