"""Runs a program that ends with its parent, and with it all that it has started:

python -m runners.machine.keeper PARENT_PID CORES PROGRAM ARGUMENT...

CORES are numbers with commas between them, or nothing for every core. The keeper is a process between the two. On Linux it
adopts what is orphaned beneath it, so that a daemon of the program's is its child, whatever session and environment that
has. When the program ends, its own parent does, or it gets SIGTERM, the keeper kills all that is beneath it and ends as the
program did. Where a system cannot adopt orphans, a daemon whose parent has ended is lost sight of.
"""

import ctypes
import os
import resource
import signal
import sys
import time
from contextlib import suppress

import psutil

from .tether import die_with_parent

PR_SET_CHILD_SUBREAPER = 36
MOST_DESCRIPTORS = 1 << 16
PAUSE_S = 0.002  # between two looks at what is still alive


class Keeper:
    """The keeper of one program, which is started with it."""

    def __init__(self, parent: int, program: list[str]):
        """Takes the process over: its signals, and every descriptor but the standard ones, which the program keeps.

        Args:
            parent: id of the process that this one ends with.
            program: its path and its arguments.
        """
        signals = signal.SIGCHLD, signal.SIGTERM
        signal.signal(signal.SIGCHLD, lambda *_: None)  # one that is ignored never comes
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        die_with_parent(parent, signal.SIGTERM)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        self.signals, self.status, keeper = signals, -signal.SIGKILL, os.getpid()
        self.program = os.fork()
        if self.program == 0:
            os.setsid()  # what it does to its process group does not end the keeper
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            die_with_parent(keeper)
            os.execv(program[0], program)
        os.closerange(3, MOST_DESCRIPTORS)

    def run(self) -> int:
        """Until the program has ended and all that it has started; returns its status as Popen.returncode has it."""
        while signal.sigwait(self.signals) == signal.SIGCHLD and not self._reap():
            pass
        self._end_all()
        return self.status

    def _reap(self) -> bool:
        """Take leave of children that have ended; was the program among them?"""
        is_over = False
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self.program:
                    is_over, self.status = True, os.waitstatus_to_exitcode(ended[1])
        return is_over

    def _end_all(self) -> None:
        """Kill every descendant until there is none but those that may not be killed, which are another user's."""
        spared: set[int] = set()
        while alive := [p for p in psutil.Process().children(recursive=True) if p.pid not in spared]:
            for process in alive:
                try:
                    process.kill()
                    is_anothers = process.status() == psutil.STATUS_ZOMBIE and process.ppid() != os.getpid()
                except psutil.NoSuchProcess:
                    continue
                except psutil.AccessDenied:
                    is_anothers = True
                if is_anothers:  # one that may not be killed, or that has ended and awaits its own parent
                    spared.add(process.pid)
            self._reap()
            time.sleep(PAUSE_S)


def end_as(status: int) -> None:
    """End this process as one with that status of Popen's has ended: by the same signal, without another core dump."""
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):  # SIGKILL has no handler to take away
            signal.signal(-status, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [-status])
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    if sys.argv[2]:
        os.sched_setaffinity(0, map(int, sys.argv[2].split(",")))
    end_as(Keeper(int(sys.argv[1]), sys.argv[3:]).run())
