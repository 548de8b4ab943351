"""Apache TVM: torch.export into Relax, default or MetaSchedule-tuned schedules, executed by the Relax virtual machine."""

import importlib.metadata
import importlib.util
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache as once
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from systems.base import BadOption, Compilation, Prepared, System
from systems.cache import JSON, Cache, code_of
from systems.compilers.compiled import Captured, Compiled, bytes_outside_torch
from systems.compilers.exported import Exported
from systems.notice import Notice

from .build import LIBRARY, build, cuda_headers, lowered, quiet, target_for
from .tuning import TuningLog, tune

NEEDED = {"tvm": "apache-tvm", "tvm_ffi": "apache-tvm-ffi"}
CRASHES = "0.1.15"  # wherever TVM writes JSON, as in its schedule space and its log
WARM_UP_RUNS = 2  # the first fills the virtual machine's memory pool
LEARNED_IN_PLACE = "learned in place: the cache lacked a finished tuning by TVM, which this process has run"


class Tvm(System):
    """TVM with default schedules, or with schedules that MetaSchedule has tuned.

    The cache holds log and library, so that trials are paid for once and a killed run goes on. A function keeps its default
    schedule unless a candidate was measured to be faster. On CUDA the generated code computes fp32 in IEEE arithmetic
    whatever the precision: TVM's schedules do not use TF32.

    Args:
        trials: Candidates that MetaSchedule measures in all, 0 for default schedules.
        budget_s: Seconds that the trials and timing the default schedules may take together.
        cuda_graph: Capture a call of the virtual machine into one CUDA Graph.

    Raises:
        BadOption: An option has another value.
    """

    name = "tvm"

    def __init__(self, trials: int = 0, budget_s: float = 300.0, cuda_graph: bool = False):
        if trials < 0:
            raise BadOption(f"system.trials is {trials}: it is a number of trials, 0 for default schedules")
        if not 0 <= budget_s < float("inf"):
            raise BadOption(f"system.budget_s is {budget_s}: it is a number of seconds, not negative")
        self.trials, self.budget_s, self.cuda_graph = trials, float(budget_s), cuda_graph

    def unsupported(self, device: str) -> str | None:
        if missing := [package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None]:
            return f"{' and '.join(missing)} is not installed: pip install 'opweave[tvm]'"
        if importlib.metadata.version("apache-tvm-ffi").startswith(CRASHES):
            return f"TVM crashes with apache-tvm-ffi {CRASHES}: pip install 'apache-tvm-ffi<0.1.15'"
        if not any(shutil.which(compiler) for compiler in ("g++", "gcc", "clang++", "clang", "c++", "cc")):
            return "TVM links its libraries with a C++ compiler (g++ or clang++) on the PATH"
        if self.cuda_graph and device != "cuda":
            return "a CUDA Graph needs a CUDA device"
        if device == "cuda" and not _cuda_enabled():
            return "this TVM was built without CUDA"
        return None

    @property
    def learns(self) -> bool:
        """Tuning measures; compiling, also without it, takes minutes and leaves its memory in the process."""
        return True

    def learn(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        with self._library(Exported(module, inputs)):
            pass

    def prepare(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> Prepared:
        exported = Exported(module, inputs)
        self.check_supported(inputs)
        bytes_before = bytes_outside_torch(exported.device)
        with self._library(exported, may_warn=True) as (folder, compilation):
            prepared = PreparedLibrary(folder / LIBRARY, exported, bytes_before, compilation)
        with exported.restored():
            for _ in range(WARM_UP_RUNS):
                prepared(*inputs)
        return Captured(prepared) if self.cuda_graph else prepared

    @contextmanager
    def _library(self, exported: Exported, may_warn: bool = False) -> Iterator[tuple[Path, Compilation]]:
        """Hold the folder of the compiled LIBRARY; tune and compile now what the cache lacks.

        Args:
            may_warn: Give a Notice if this tunes.
        """
        # TVM's own default is one thread for every two CPUs, here and in the process that times candidates.
        os.environ["TVM_NUM_THREADS"] = str(torch.get_num_threads())
        # With fewer threads than the machine has cores, TVM binds them to the first cores, whichever cores this process may
        # use. All threads that the caller starts afterwards would inherit that.
        os.environ.setdefault("TVM_BIND_THREADS", "0")
        target = target_for(exported.device)
        versions: dict[str, JSON] = {name: importlib.metadata.version(name) for name in ("torch", *NEEDED.values())}
        common: dict[str, JSON] = {"target": str(target), "versions": versions}
        cache = Cache()
        lowered_once = once(lambda: lowered(exported, target))
        with ExitStack() as stack:
            if exported.device.type == "cuda":
                stack.enter_context(cuda_headers())
            log, usable = None, None
            if self.trials:
                folder = cache.workspace("tvm-log", exported.label, common | {"model": exported.structure})
                log = TuningLog(stack.enter_context(folder))
                if may_warn and not log.is_finished(self.trials, self.budget_s):
                    warnings.warn(LEARNED_IN_PLACE, category=Notice, stacklevel=4)
                tune(lowered_once, target, log, self.trials, self.budget_s, self.report)
                usable = log.within(self.trials, self.budget_s)

            def make(library: Path) -> Mapping[str, JSON]:
                self.report("building")
                return build(lowered_once(), target, library, log.best(usable) if log and usable else None)

            ingredients = common | {"model": exported.content, "code": code_of(build.__module__)}
            ingredients["log"] = usable.digest if usable else None
            artefact = stack.enter_context(cache.artefact("tvm", exported.label, ingredients, make))
            functions, tuned = artefact.notes["functions"], artefact.notes.get("tuned")
            assert isinstance(functions, int) and isinstance(tuned, int | None)
            yield (
                artefact.folder,
                Compilation(
                    compile_s=artefact.seconds,
                    is_compiled_now=artefact.is_new,
                    functions=functions,
                    tuned=tuned,
                    trials=None if usable is None else len(usable.records),
                    tuning_s=None if usable is None else usable.seconds,
                ),
            )


class PreparedLibrary(Compiled):
    """A TVM library in its virtual machine, which takes torch's tensors as they are and returns its own as torch's."""

    def __init__(self, library: Path, exported: Exported, bytes_before: int, compilation: Compilation):
        super().__init__(exported, bytes_before, compilation)
        import tvm
        from tvm import relax
        from tvm.runtime import load_module

        device = exported.device
        if device.type == "cpu":
            every_core = 1
            tvm.get_global_func("runtime.config_threadpool")(every_core, torch.get_num_threads())
        self.device = tvm.cuda(device.index or 0) if device.type == "cuda" else tvm.cpu()
        with quiet():
            self.machine: Any = relax.VirtualMachine(load_module(str(library)), self.device)
        self.function: Any = self.machine["main"]

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        if self.function is None:
            raise RuntimeError("this executor is closed")
        with self._on_current_stream():
            return list(self.function(*inputs))

    def _on_current_stream(self) -> AbstractContextManager[Any]:
        """TVM launches on torch's current stream."""
        if self.exported.device.type != "cuda":
            return nullcontext()
        import tvm_ffi

        return tvm_ffi.use_raw_stream(self.device, torch.cuda.current_stream(self.exported.device).cuda_stream)

    def close(self) -> None:
        self.function = self.machine = None


def _cuda_enabled() -> bool:
    import tvm

    return bool(tvm.runtime.enabled("cuda"))
