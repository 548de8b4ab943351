"""Runs a program that ends with its parent: python -m runners.machine.tether PROGRAM ARGUMENT..."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent ends (Linux).

    The request survives exec, but children do not inherit it. On other systems a worker ends with its standard input.

    Args:
        parent: the parent's process id.
        number: of the signal.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:  # the parent ended before the kernel took the request
            os._exit(1)


if __name__ == "__main__":
    die_with_parent(os.getppid())
    os.execvp(sys.argv[1], sys.argv[1:])
