"""Builds functions for TVM's tuner, in several processes at once, and times them one after the other in another."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

BUILD_SECONDS = 60.0  # a candidate that takes longer counts as invalid
RUN_SECONDS = 20.0
REPEAT_MS = 50  # for which a candidate runs
PROCESS_USES = 256  # candidates that one process builds: TVM leaks memory there


class Measuring:
    """Compiles scheduled modules of one function, several at once, and then times them one by one.

    Args:
        target: A tvm.target.Target.
        built: The folder of compiled modules.
        num_modules: In one call, at most.
    """

    def __init__(self, target: Any, built: Path, num_modules: int):
        from tvm.s_tir import meta_schedule
        from tvm.support.popen_pool import PopenPoolExecutor

        self.target, self.build = target, _building(str(built))
        self.device = "cuda" if target.kind.name == "cuda" else "cpu"
        processes = min(os.cpu_count() or 1, num_modules)
        self.pool = PopenPoolExecutor(processes, BUILD_SECONDS, maximum_process_uses=PROCESS_USES)
        for _ in range(processes):
            self.pool.submit(_importing())  # meanwhile the process that runs candidates starts
        runner = meta_schedule.runner
        how = runner.EvaluatorConfig(min_repeat_ms=REPEAT_MS)
        after = _ending_with_its_device() if self.device == "cuda" else None
        self.runner = runner.LocalRunner(RUN_SECONDS, how, f_cleanup=after)

    def __call__(self, modules: Sequence[Any]) -> list[Any]:
        """A RunnerResult of MetaSchedule for each module: seconds, or why there are none."""
        from tvm.s_tir.meta_schedule import arg_info, runner
        from tvm.support.popen_pool import StatusKind

        build, target = self.build, self.target  # the function below travels, and must not hold the pool
        # Compile all before timing the first: compiling takes the cores that a candidate, or its launches, run on.
        built = list(self.pool.map_with_error_catching(lambda module: build(module, target), modules))
        results = []
        for module, library in zip(modules, built, strict=True):
            if library.status != StatusKind.COMPLETE:
                results.append(runner.RunnerResult(None, repr(library.value)))
                continue
            information = arg_info.ArgInfo.from_entry_func(module, remove_preproc=True)
            (future,) = self.runner.run([runner.RunnerInput(library.value, self.device, information)])
            results.append(future.result())
            os.unlink(library.value)
        return results

    def close(self) -> None:
        self.pool.shutdown()
        self.runner.pool.shutdown()  # on a GPU it holds a context


def _importing() -> Callable[[], None]:
    def load() -> None:
        import tvm.driver
        import tvm.s_tir.transform  # noqa: F401

    return load


def _building(folder: str) -> Callable[[Any, Any], str]:
    """A function that compiles one module into a folder, and that travels to another process by value.

    It replaces TVM's own LocalBuilder for three reasons. That starts new processes for each batch, which takes longer than
    building the batch. Each of them imports the tensor intrinsics, though a candidate holds the bodies of those it uses. A
    killed one leaves its files in the folder for temporary files.
    """

    def build(module: Any, target: Any) -> str:
        import os
        import tempfile

        from tvm.driver import build
        from tvm.s_tir.transform import RemoveWeightLayoutRewriteBlock

        library = build(RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)(module), target=target)
        file = os.path.join(tempfile.mkdtemp(dir=folder), "candidate.so")
        library.export_library(file)  # link here, several at once, rather than in the process that times them
        return file

    return build


def _ending_with_its_device() -> Callable[[], None]:
    """A function that ends its process if its GPU fails, called after each candidate in the process that runs them.

    After a kernel that reads or writes out of bounds, the GPU answers every later call of that process with an error: all
    further candidates would count as invalid. A new process runs the next candidate.
    """

    def check() -> None:
        import os

        import tvm

        try:
            tvm.cuda(0).sync()
        except Exception:
            os._exit(1)

    return check
