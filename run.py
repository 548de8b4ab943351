"""The command line: python run.py model=nasnet system=nimble batch=1 (see --help)."""

import os
import signal
import sys
import traceback
from types import FrameType

BROKEN = 3  # the exit status; 1 says that a cell failed, 2 that the request was wrong


def end(number: int, frame: FrameType | None) -> None:
    """End the process at once, with the status that a shell gives to one that this signal has ended."""
    os._exit(128 + number)


def end_at_interrupts() -> None:
    """Have an interrupt end the process without a word, unless it is ignored, as in a shell's background."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end)


def main() -> None:
    """Run the command line. Before and after it there is nothing that an interrupt would have to put in order."""
    end_at_interrupts()
    try:
        from runners.command import main  # its libraries take most of a second, in which an interrupt would be a traceback

        main()
    except Exception:
        traceback.print_exc()
        sys.exit(BROKEN)
    finally:
        end_at_interrupts()


if __name__ == "__main__":
    main()
