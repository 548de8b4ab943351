"""Measured costs, which stay from one run to the next, so that a search by measuring is paid for once."""

import hashlib
import json
import os
import platform
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter

import torch
from filelock import FileLock, Timeout

from systems.cache import JSON, default_folder, not_kept
from systems.notice import Caution

WRITE_SECONDS = 5.0  # between two writings of what is set one by one


class Measurements:
    """Measured costs by name, in one JSON file for each kind, device, library version and setting of the arithmetic.

    The file lies in the folder that the environment variable OPWEAVE_CACHE names, else in ~/.cache/opweave. A file that
    cannot be read is made anew. One that cannot be written gives a Caution, and its costs are measured again next time.

    Args:
        kind: What the costs are of: "times", "opara".
    """

    def __init__(self, kind: str, device: torch.device):
        self.conditions = conditions(device)
        digest = hashlib.sha256(json.dumps(self.conditions, sort_keys=True).encode()).hexdigest()[:16]
        self.file = default_folder() / f"{kind}-{device.type}-{digest}.json"
        self.measured = self._read()
        self.unwritten: dict[str, JSON] = {}
        self.written_s = perf_counter()

    def __contains__(self, name: str) -> bool:
        return name in self.measured

    def __getitem__(self, name: str) -> JSON:
        return self.measured[name]

    def __setitem__(self, name: str, value: JSON) -> None:
        """Note one cost. It is written with others, by the first note after WRITE_SECONDS or by `write`."""
        self.measured[name] = self.unwritten[name] = value
        if perf_counter() - self.written_s > WRITE_SECONDS:
            self.write()

    def number(self, name: str) -> float:
        """A cost that is a number."""
        value = self.measured[name]
        assert isinstance(value, int | float), f"{name} in {self.file} is no number"
        return float(value)

    def add(self, measured: Mapping[str, JSON]) -> None:
        """Note several costs, and write them."""
        self.measured.update(measured)
        self.unwritten.update(measured)
        self.write()

    @contextmanager
    def alone(self, name: str, report: Callable[[str], None]) -> Iterator[None]:
        """Hold one cost: a process that wants it too waits, and knows within what this one has written of it.

        Where the folder cannot be written nobody waits for anybody.

        Args:
            name: Of the cost.
            report: Told where this process waits.
        """
        folder = self.file.parent / "locks"
        digest = hashlib.sha256(f"{self.file.name} {name}".encode()).hexdigest()[:24]
        lock = FileLock(folder / f"{digest}.lock")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire(blocking=False)
        except Timeout:
            report("waiting for another process, which searches for the same")
            lock.acquire()
        except OSError:
            yield
            return
        self.measured |= self._read() | self.unwritten
        try:
            yield
        finally:
            lock.release()

    def write(self) -> None:
        """Write the new costs beside those that other processes have written meanwhile. The file is replaced whole."""
        if not self.unwritten:
            return
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{self.file}.lock"):
                self.measured |= self._read() | self.unwritten  # others may know better what this process has read
                with tempfile.NamedTemporaryFile("w", dir=self.file.parent, suffix=".partial", delete=False) as partial:
                    json.dump({"of": self.conditions, "measured": self.measured}, partial)
                os.replace(partial.name, self.file)
            self.unwritten = {}
        except OSError as error:
            warnings.warn(not_kept(self.file.parent, error), category=Caution, stacklevel=2)
        self.written_s = perf_counter()

    def _read(self) -> dict[str, JSON]:
        try:
            document = json.loads(self.file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        is_ours = isinstance(document, dict) and document.get("of") == self.conditions
        measured = document.get("measured") if is_ours else None
        return measured if isinstance(measured, dict) else {}


def conditions(device: torch.device) -> dict[str, JSON]:
    """What has to be the same for a cost to hold again: device, libraries, and how arithmetic is rounded."""
    common: dict[str, JSON] = {"torch": torch.__version__}
    if device.type == "cuda":
        cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
        return common | {
            "device": torch.cuda.get_device_name(device),
            "cuda": torch.version.cuda,
            "cudnn": cudnn.version(),
            "settings": [cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic, matmul.allow_tf32],
        }
    capability = torch.backends.cpu.get_cpu_capability()
    return common | {"device": f"{platform.node()} {platform.machine()} {capability}", "threads": torch.get_num_threads()}
