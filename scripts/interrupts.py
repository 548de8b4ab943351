"""What a script says when it is interrupted: one line, and the exit status that a shell gives."""

import os
import sys
from pathlib import Path
from types import TracebackType

INTERRUPTED = 130


def tell_interrupts() -> None:
    """Have an interrupt that nothing handles end the program with a line in the place of a traceback.

    A script calls this before it imports its libraries, which takes seconds.
    """

    def told(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            sys.__excepthook__(kind, error, trace)
            return
        print(f"{Path(sys.argv[0]).name}: interrupted", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(INTERRUPTED)  # Python itself would end by the signal

    sys.excepthook = told
