"""What of a request only the models and systems themselves can tell is wrong, seen before anything is measured."""

import hashlib
import sys
import sysconfig
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import systems
from models.decoders import decoder_size
from models.registry import PIPELINE, SERVED
from models.table_options import TableOptions
from results.cell import Choice
from runners.machine.installation import module_name

from .loading import load


def sources_of(group: str, choice: Choice, batch: int, report: Callable[[str], None]) -> str | None:
    """Try the options of a model or of a system; a custom model is made once, on the CPU.

    Args:
        group: "model" or "system".
        choice: the one whose options are tried.
        batch: samples a call.
        report: told what is being done now.

    Returns:
        A digest of the files that a custom model or scheduler, or another checkout, came from; None for any other choice.

    Raises:
        BadModel, BadOption: they are wrong.
    """
    if group == "system" and choice.name == "custom":
        import_module(module_name("systems.custom.system"))  # before the user's own modules, which are told apart by it
        before = set(sys.modules)
        systems.load(choice.name, **choice.options)
        return digest_of(set(sys.modules) - before)
    if group == "system":
        system = systems.load(choice.name, **choice.options)
        return getattr(system, "digest", None)  # of another checkout
    if choice.name == PIPELINE:
        options: dict[str, Any] = choice.options
        TableOptions(**options)
    elif choice.name in SERVED:
        decoder_size(choice.name, **choice.options)
    elif choice.name != "custom":
        load(choice, batch, device="meta")  # options may be wrong in combination only
    else:
        report("making the model")
        before = set(sys.modules)
        load(choice, batch)
        return digest_of(set(sys.modules) - before)
    return None


def digest_of(names: set[str]) -> str:
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
