"""Measured costs, kept from one run to the next, so that a search by measuring is paid for once."""

import hashlib
import json
import os
import platform
import tempfile
import warnings
from time import perf_counter
from typing import Any

import torch
from filelock import FileLock

from systems.cache import default_folder
from systems.notice import Notice

SECONDS = 5.0  # after which what was measured since the last writing is written


class Cache:
    """Measurements by name, in one JSON file for each kind, device, library version and setting of the arithmetic.

    The file lies in the folder that the environment variable OPWEAVE_CACHE names, else in ~/.cache/opweave. One that cannot
    be read is made anew; one that cannot be written is warned of, and what it would keep is measured again next time.
    """

    def __init__(self, kind: str, device: torch.device):
        self.of = conditions(device)
        digest = hashlib.sha256(json.dumps(self.of, sort_keys=True).encode()).hexdigest()[:16]
        self.file = default_folder() / f"{kind}-{device.type}-{digest}.json"
        self.measured = self._read()
        self.unwritten: dict[str, Any] = {}
        self.written = perf_counter()

    def __contains__(self, name: str) -> bool:
        return name in self.measured

    def __getitem__(self, name: str) -> Any:
        return self.measured[name]

    def __setitem__(self, name: str, value: Any) -> None:
        """Keep a measurement; it is written with others within SECONDS of the next one, or by `write`."""
        self.measured[name] = self.unwritten[name] = value
        if perf_counter() - self.written > SECONDS:
            self.write()

    def add(self, measured: dict[str, Any]) -> None:
        """Keep several, and write them."""
        self.measured |= measured
        self.unwritten |= measured
        self.write()

    def write(self) -> None:
        """Write what is new, beside what other processes have written meanwhile. The file is replaced whole."""
        if not self.unwritten:
            return
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{self.file}.lock"):
                self.measured = {**self._read(), **self.measured}
                with tempfile.NamedTemporaryFile("w", dir=self.file.parent, suffix=".partial", delete=False) as partial:
                    json.dump({"of": self.of, "measured": self.measured}, partial)
                os.replace(partial.name, self.file)
        except OSError as error:
            warnings.warn(
                f"{self.file} cannot be written, so this is measured anew each time: {error}", category=Notice, stacklevel=2
            )
        self.unwritten, self.written = {}, perf_counter()

    def _read(self) -> dict[str, Any]:
        try:
            document = json.loads(self.file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        known = isinstance(document, dict) and document.get("of") == self.of and isinstance(document.get("measured"), dict)
        return document["measured"] if known else {}


def conditions(device: torch.device) -> dict[str, Any]:
    """What has to be the same for a measurement to hold again: device, libraries, and how arithmetic is rounded."""
    found: dict[str, Any] = {"torch": torch.__version__}
    if device.type == "cuda":
        cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
        return found | {
            "device": torch.cuda.get_device_name(device),
            "cuda": torch.version.cuda,
            "cudnn": cudnn.version(),
            "settings": [cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic, matmul.allow_tf32],
        }
    capability = torch.backends.cpu.get_cpu_capability()
    return found | {"device": f"{platform.node()} {platform.machine()} {capability}", "threads": torch.get_num_threads()}
