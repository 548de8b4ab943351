"""The process of one cell: commands come as JSON lines on standard input, answers go to the file descriptor given.

python -m runners.worker ANSWERS_FD
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any


def die_with_parent() -> None:
    """Have the kernel end this process when its parent is killed (Linux); elsewhere the end of standard input does."""
    if sys.platform == "linux":
        import ctypes
        import signal

        set_parent_death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def serve(answers: Any) -> None:
    """Carry out commands until standard input ends.

    {"do": "measure" | "prepare", "cell": ..., "visible_device": ..., "limits": known ones or null} answers
    {"record": ..., "environment": ...} or {"status": ..., "reason": ...}; {"do": "round"} answers {"host_ms": [...]};
    {"do": "check", "cell": ...} loads the model only. {"phase": ...} lines come between. A bad
    request answers {"bad_request": ...}.
    """

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    session: Any = None
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "round":
            answer(guarded(lambda: {"host_ms": session.round()}))
            continue

        def run(command: dict[str, Any] = command) -> dict[str, Any]:
            nonlocal session
            from .session import Session

            if command["do"] == "check":
                from models import load

                options = {k: v for k, v in command["cell"]["model"].items() if k != "name"}
                load(command["cell"]["model"]["name"], command["cell"]["batch"], **options)
                return {"checked": True}
            if command["do"] in ("schedule", "list"):
                from . import catalogue, schedule

                return {"schedule": schedule, "list": catalogue}[command["do"]].run(command["cell"], report)
            session = Session(command["cell"], command["visible_device"], report)
            if command["do"] == "prepare":
                session.prepare()
                return {"prepared": True}
            record = session.measure(command.get("limits"))
            return {"record": record, "environment": session.describe()}

        def report(phase: str) -> None:
            answer({"phase": phase})

        report("importing PyTorch")
        if command["do"] == "import":  # nobody waits for an answer
            from . import session as _imported  # noqa: F401

            continue
        answer(guarded(run))


def guarded(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `run` answers, or the status that stands for what it raised."""
    import torch

    from models import BadModel
    from systems.base import BadOption, Unsupported

    try:
        return run()
    except (BadModel, BadOption) as error:
        return {"bad_request": one_line(error)}
    except Unsupported as error:
        return {"status": "unsupported", "reason": one_line(error)}
    except (torch.cuda.OutOfMemoryError, MemoryError) as error:
        return {"status": "out_of_memory", "reason": one_line(error)}
    except Exception as error:  # whatever a model or a library raises is that cell's failure, told in its record
        import traceback

        traceback.print_exc()
        return {"status": "failed", "reason": f"{type(error).__name__}: {one_line(error)}"}


def one_line(error: BaseException) -> str:
    """The first line of an error's message that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


if __name__ == "__main__":
    die_with_parent()
    with os.fdopen(int(sys.argv[1]), "w", encoding="utf-8") as channel:
        serve(channel)
