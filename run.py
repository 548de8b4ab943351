"""The command line: python run.py model=nasnet system=nimble batch=1 (see --help)."""

import os
import select
import signal
import sys
import traceback
from contextlib import suppress
from types import FrameType

BROKEN = 3  # the exit status; 1 says that a cell failed, 2 that the request was wrong
STDOUT = 1
UNREAD = 128 + signal.SIGPIPE  # as a shell gives to one that prints for nobody


def end(number: int, frame: FrameType | None) -> None:
    """End the process at once, with the status that a shell gives to one that this signal has ended."""
    os._exit(128 + number)


def end_at_interrupts() -> None:
    """Have an interrupt end the process without a word, unless it is ignored, as in a shell's background."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end)


def is_unread() -> bool:
    """Whether nobody reads standard output any more, as after `| head`; what is still to be printed then goes nowhere."""
    if sys.stdout is None:  # closed from the beginning
        return False
    with suppress(BrokenPipeError):
        sys.stdout.flush()
    output = select.poll()
    output.register(STDOUT, 0)
    if not output.poll(0):  # an error is told unasked
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)
    return True


def main() -> None:
    """Run the command line. Before and after it there is nothing that an interrupt would have to put in order."""
    end_at_interrupts()
    try:
        from runners.command import main  # its libraries take most of a second, in which an interrupt would be a traceback

        main()
    except Exception as error:
        if isinstance(error, BrokenPipeError) and is_unread():
            sys.exit(UNREAD)
        traceback.print_exc()
        sys.exit(BROKEN)
    finally:
        is_unread()  # of which Python would complain at its end
        end_at_interrupts()


if __name__ == "__main__":
    main()
