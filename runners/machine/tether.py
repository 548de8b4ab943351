"""Runs a program that ends with its parent: python -m runners.machine.tether PROGRAM ARGUMENT..."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends (Linux).

    The request survives exec, but children do not inherit it. On other systems a worker ends with its standard input.

    Args:
        parent: the parent's process id.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent ended before the kernel took the request
            os._exit(1)


def adopt_orphans() -> None:
    """Have descendants whose parent ends become children of this process (Linux), so that none is lost sight of."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


if __name__ == "__main__":
    die_with_parent(os.getppid())
    os.execvp(sys.argv[1], sys.argv[1:])
