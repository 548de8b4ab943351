"""What of a request only the models and systems themselves can tell is wrong, found before anything is measured."""

import hashlib
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import systems


def run(cell: dict[str, Any], report: Callable[[str], None]) -> dict[str, Any]:
    """Try the options of a cell's model, or of its system; a custom model is made once, on the CPU.

    sources: a digest of the files that a custom model came from. Raises BadModel or BadOption.
    """
    group = "model" if "model" in cell else "system"
    name = cell[group]["name"]
    options = {key: value for key, value in cell[group].items() if key != "name"}
    if group == "system":
        systems.load(name, **options)
    elif name != "custom":
        models.load(name, cell["batch"], device="meta", **options)  # options may be wrong in combination only
    else:
        report("making the model")
        before = set(sys.modules)
        models.load(name, cell["batch"], **options)
        return {"checked": True, "sources": sources(set(sys.modules) - before)}
    return {"checked": True, "sources": None}


def sources(names: set[str]) -> str:
    """A digest of the source files of these imported modules, without those of Python and of installed packages.

    The modules are forgotten, so that the next model's are imported anew.
    """
    installed = [Path(sysconfig.get_path(kind)) for kind in ("stdlib", "purelib", "platlib")]
    digest = hashlib.sha256()
    for name in sorted(names):
        file = getattr(sys.modules[name], "__file__", None)
        if file and not any(Path(file).is_relative_to(folder) for folder in installed):
            digest.update(name.encode() + Path(file).read_bytes())
            del sys.modules[name]
    return digest.hexdigest()[:12]
