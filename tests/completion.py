"""What a shell offers for a command line that has been begun."""

import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import environment

COMPLETE = """
eval "$(PROGRAM -sc install=bash)"
COMP_LINE="$*" COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
COMP_POINT=${#COMP_LINE}
function=$(complete -p "$1" | sed 's/.* -F \\([^ ]*\\) .*/\\1/')
"$function" "$@"
printf '%s\\n' "${COMPREPLY[@]}"
"""


def completions(program: str, word: str, programs: Path, cwd: Path) -> list[str]:
    """What bash offers for `word` after a program, once the program's completion is installed.

    Args:
        program: as it is typed.
        word: the last of the line.
        programs: the folder that programs are looked for in first.
        cwd: the working directory.
    """
    if not shutil.which("bash"):
        pytest.skip("bash is not installed")
    settings = environment()
    settings["PATH"] = f"{programs}:{settings['PATH']}"
    settings.pop("PYTHONPATH", None)
    script = COMPLETE.replace("PROGRAM", program)
    arguments = ["bash", "-c", script, "bash", *program.split(), word]
    done = subprocess.run(arguments, cwd=cwd, env=settings, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return done.stdout.split()
