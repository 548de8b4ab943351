"""Apache TVM: torch.export into Relax, default or MetaSchedule-tuned schedules, executed by the Relax virtual machine."""

import importlib.metadata
import importlib.util
import os
import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cache as once
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from systems.base import BadOption, Prepared, System
from systems.cache import Cache, code_of
from systems.compilers.compiled import Captured, Compiled, held_outside_torch
from systems.compilers.exported import Exported

from .build import LIBRARY, build, cuda_headers, lowered, quiet, target_for
from .tuning import TuningLog, tune

NEEDED = {"tvm": "apache-tvm", "tvm_ffi": "apache-tvm-ffi"}
CRASHES = "0.1.15"  # where it writes JSON, as in its schedule space and its log
WARM_UP_RUNS = 2  # the first fills the virtual machine's memory pool


class Tvm(System):
    """trials: candidates that MetaSchedule measures in all, 0 for default schedules. budget_s: seconds that they and
    timing the default schedules may take together. cuda_graph: capture a call of the virtual machine into one CUDA Graph.

    Log and library are kept, so that trials are paid for once and a run that was killed goes on. A function keeps its
    default schedule where no candidate was measured to be faster. On CUDA the generated code is IEEE in fp32 whatever the
    precision: TVM's schedules do not use TF32.
    """

    name = "tvm"

    def __init__(self, trials: int = 0, budget_s: float = 300.0, cuda_graph: bool = False):
        if trials < 0:
            raise BadOption(f"system.trials is {trials}: it is a number of trials, 0 for default schedules")
        if not 0 <= budget_s < float("inf"):
            raise BadOption(f"system.budget_s is {budget_s}: it is a number of seconds")
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

    def prepare(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> Prepared:
        exported = Exported(module, inputs)
        held = held_outside_torch(exported.device)
        # Of its own accord TVM makes one for every two CPUs, here and in the process that times candidates.
        os.environ["TVM_NUM_THREADS"] = str(torch.get_num_threads())
        # Where these are fewer than the machine's cores it binds them, and all that the calling thread starts from then on,
        # to the first of those, whichever cores this process was given.
        os.environ.setdefault("TVM_BIND_THREADS", "0")
        target = target_for(exported.device)
        versions = {package: importlib.metadata.version(package) for package in ("torch", *NEEDED.values())}
        of: dict[str, Any] = {"target": str(target), "versions": versions}
        cache = Cache()
        module_to_build = once(lambda: lowered(exported, target))
        with ExitStack() as stack:
            if exported.device.type == "cuda":
                stack.enter_context(cuda_headers())
            log, usable = None, None
            if self.trials:
                folder = cache.workspace("tvm-log", exported.label, of | {"model": exported.structure})
                log = TuningLog(stack.enter_context(folder))
                tune(module_to_build, target, log, self.trials, self.budget_s, self.report)
                usable = log.within(self.trials, self.budget_s)

            def make(library: Path) -> dict[str, int]:
                self.report("building")
                return build(module_to_build(), target, library, log.best(usable) if log and usable else None)

            code = code_of(build.__module__)
            of |= {"model": exported.content, "code": code, "log": usable.digest if usable else None}
            artefact = stack.enter_context(cache.artefact("tvm", exported.label, of, make))
            compilation: dict[str, Any] = {"compile_s": artefact.seconds, "compiled_now": artefact.made, **artefact.notes}
            if usable is not None:
                compilation |= {"trials": len(usable.records), "tuning_s": usable.seconds}
            prepared = PreparedLibrary(artefact.folder / LIBRARY, exported, held, compilation)
        for _ in range(WARM_UP_RUNS):
            prepared(*inputs)
        return Captured(prepared) if self.cuda_graph else prepared


class PreparedLibrary(Compiled):
    """A TVM library in its virtual machine, which takes torch's tensors as they are and returns its own as torch's."""

    def __init__(self, library: Path, exported: Exported, held: int, compilation: dict[str, Any]):
        super().__init__(exported, held, compilation)
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
