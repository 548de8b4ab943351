"""What a script says when it is interrupted, or when nobody reads it, and the exit status that a shell gives."""

import atexit
import os
import select
import signal
import sys
from pathlib import Path
from types import TracebackType

INTERRUPTED = 130
UNREAD = 128 + signal.SIGPIPE


def is_unread() -> bool:
    """Whether nobody reads standard output any more."""
    output = select.poll()
    output.register(1, 0)
    return bool(output.poll(0))  # an error is told unasked


def _end_unread() -> None:
    """Have what is still to be printed go nowhere if nobody reads it, of which Python would complain at its end."""
    if is_unread():
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def tell_interrupts() -> None:
    """Have an interrupt that nothing handles end the program with a line in the place of a traceback.

    Where nobody reads what it prints, as after `| head`, the program ends without a line.
    A script calls this before it imports its libraries, which takes seconds.
    """

    def told(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, BrokenPipeError) and is_unread():
            os._exit(UNREAD)
        if not issubclass(kind, KeyboardInterrupt):
            sys.__excepthook__(kind, error, trace)
            return
        print(f"{Path(sys.argv[0]).name}: interrupted", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(INTERRUPTED)  # Python itself would end by the signal

    sys.excepthook = told
    atexit.register(_end_unread)
