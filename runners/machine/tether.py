"""Runs a program that ends with its parent: python -m runners.machine.tether PROGRAM ARGUMENT..."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent, of the process id `parent`, ends (Linux).

    It holds across exec, but not for children. Elsewhere a worker ends with its standard input.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the kernel was told
            os._exit(1)


if __name__ == "__main__":
    die_with_parent(os.getppid())
    os.execvp(sys.argv[1], sys.argv[1:])
