"""Runs a command that dies with the process that started it: `python tied.py PARENT_PID command …`.

Invariant: the command takes this process's place (same pid, own command line), and the kernel kills it with the given
signal when the parent goes, even by kill -9. Done here, between fork and exec, because running Python code in a forked
child of a process with threads may hang. Only Linux can do it; elsewhere the command simply runs, and whoever starts
next cleans up.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def tied_command(command: list[str]) -> list[str]:
    """The command line to start instead of `command`, so that it dies with the calling process."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command] if sys.platform == "linux" else command


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it went before the kernel was told
        raise SystemExit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
