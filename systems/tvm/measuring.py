"""Builds functions for TVM's tuner, in several processes at once, and times them one after the other in another."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

BUILD_SECONDS = 60.0  # a candidate that takes longer counts as invalid
RUN_SECONDS = 20.0
REPEAT_MS = 50  # a candidate is run for so long
PROCESS_USES = 256  # TVM leaks memory in a process that builds; after so many candidates there is a new one


class Measuring:
    """Compiles scheduled modules of one function for `target` into the folder `built`, and times them. at_once: how many it
    will be given.
    """

    def __init__(self, target: Any, built: Path, at_once: int):
        from tvm.s_tir import meta_schedule
        from tvm.support.popen_pool import PopenPoolExecutor

        self.target, self.build = target, _building(str(built))
        self.device = "cuda" if target.kind.name == "cuda" else "cpu"
        processes = min(os.cpu_count() or 1, at_once)
        self.pool = PopenPoolExecutor(processes, BUILD_SECONDS, maximum_process_uses=PROCESS_USES)
        for _ in range(processes):
            self.pool.submit(_importing())  # while the process that runs candidates starts too
        runner = meta_schedule.runner
        how = runner.EvaluatorConfig(min_repeat_ms=REPEAT_MS)
        after = _ending_with_its_device() if self.device == "cuda" else None
        self.runner = runner.LocalRunner(RUN_SECONDS, how, f_cleanup=after)

    def __call__(self, modules: Sequence[Any]) -> list[Any]:
        """A RunnerResult of MetaSchedule for each: seconds, or why there are none."""
        from tvm.s_tir.meta_schedule import arg_info, runner
        from tvm.support.popen_pool import StatusKind

        build, target = self.build, self.target  # what travels must not hold the pool
        # All of them before the first is timed: compiling takes the cores that a candidate, or what launches it, runs on.
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
    """A function that travels to another process by value.

    TVM's own LocalBuilder starts new processes for each batch, which takes longer than building it, has each of them import
    the tensor intrinsics, though a candidate holds the bodies of those that it uses, and leaves what it built in the folder
    for temporary files where it is killed.
    """

    def build(module: Any, target: Any) -> str:
        import os
        import tempfile

        from tvm.driver import build
        from tvm.s_tir.transform import RemoveWeightLayoutRewriteBlock

        library = build(RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)(module), target=target)
        file = os.path.join(tempfile.mkdtemp(dir=folder), "candidate.so")
        library.export_library(file)  # linked here, several at once, and not by the process that times them
        return file

    return build


def _ending_with_its_device() -> Callable[[], None]:
    """A function that travels to the process that runs candidates, and is called there after each of them.

    A kernel that reads or writes out of bounds leaves its process with a GPU that answers every later call with an error:
    all further candidates would count as invalid. So such a process ends, and there is another for the next candidate.
    """

    def check() -> None:
        import os

        import tvm

        try:
            tvm.cuda(0).sync()
        except Exception:
            os._exit(1)

    return check
