"""torch.compile through Inductor, as configured or at the best of what it offers."""

import copy
import hashlib
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from statistics import median
from time import perf_counter
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from systems.base import BadOption, Prepared, PreparedModule, System, Unsupported
from systems.cache import Cache
from systems.compilers.exported import first_line
from systems.scheduling.graph.program import describe
from systems.training.step import Loss, ModuleStep, undone

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
CAPTURING = ("reduce-overhead", "max-autotune")  # on a GPU
TUNING = ("max-autotune", "max-autotune-no-cudagraphs")  # which take minutes where the others take seconds
LAYOUTS = ("given", "contiguous", "channels_last")
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
WARM_UP_RUNS = 3  # CUDA Graph Trees warm up, record and replay in the first three calls
SAMPLES, SAMPLE_SECONDS, MOST_SAMPLES = 5, 0.3, 100
AGAIN_SECONDS = 5.0  # after which a compiler that swallowed being interrupted is interrupted once more


@dataclass(frozen=True)
class Variant:
    """One way to compile. mode: of MODES. layout: of LAYOUTS. freezing: weights become constants, and what is computed from
    them alone is computed once.
    """

    mode: str
    layout: str
    freezing: bool

    def __str__(self) -> str:
        return f"{self.mode}, layout {self.layout}{', frozen' if self.freezing else ''}"


class TorchCompile(System):
    """mode, layout, freezing: as `Variant`. best: try all of them, the configured one first, for `budget_s` seconds, and
    keep the one whose calls take least. Where the seconds are over, what is being compiled is given up, but for the first.

    Inductor's own cache lies in ours, for each module and inputs, unless TORCHINDUCTOR_CACHE_DIR names another place. What
    Inductor reads back from there are pickles of its own.
    """

    name = "torch_compile"
    own_randomness = True  # Inductor has a generator of its own

    def __init__(
        self,
        mode: str = "reduce-overhead",
        layout: str = "given",
        freezing: bool = False,
        best: bool = False,
        budget_s: float = 480.0,
    ):
        for option, value, valid in (("mode", mode, MODES), ("layout", layout, LAYOUTS)):
            if value not in valid:
                raise BadOption(f"system.{option} is {value}, not one of {', '.join(valid)}")
        if not 0 <= budget_s < float("inf"):
            raise BadOption(f"system.budget_s is {budget_s}: it is a number of seconds")
        self.variant, self.best, self.budget_s = Variant(mode, layout, freezing), best, budget_s

    def unsupported(self, device: str) -> str | None:
        if not any(shutil.which(compiler) for compiler in ("g++", "c++", "clang++", "gcc")):
            return "Inductor needs a C++ compiler (g++ or clang++) on the PATH"
        return None

    def prepare(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> Prepared:
        with _inductor_cache(module, inputs):
            if not self.best:
                prepared = compiled(module, inputs, self.variant)
                prepared.compilation = {**asdict(self.variant), **prepared.compilation}
                return prepared
            return self._best(module, inputs)

    def _best(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> Prepared:
        """The fastest of the variants that were compiled within the budget. One that fails is told among those tried,
        however it fails, and so is one that the end of the budget interrupts; where all fail, the configured one raises
        what it raised.
        """
        begin, longest = perf_counter(), 0.0
        tried: list[dict[str, Any]] = []
        variants = self.variants(inputs)
        for variant in variants:
            spent = perf_counter() - begin
            if tried and spent + longest > self.budget_s:
                break
            self.report(f"variant {len(tried) + 1} of {len(variants)}, {spent:.0f} of {self.budget_s:.0f} s: {variant}")
            entry: dict[str, Any] = asdict(variant)
            try:
                most = _at_most(self.budget_s - spent if tried else None)
                with most, closing(compiled(module, inputs, variant)) as made:
                    entry |= {**made.compilation, "latency_ms": _milliseconds(made, inputs)}
            except OverBudget:
                entry |= {"latency_ms": None, "reason": f"not compiled within the budget of {self.budget_s:g} s"}
            except Exception as error:  # as when a kernel of Inductor's fails to start, which is no fault of the others
                entry |= {"latency_ms": None, "reason": first_line(error)}
            tried.append(entry)
            longest = max(longest, perf_counter() - begin - spent)
        ran = [(entry["latency_ms"], i) for i, entry in enumerate(tried) if entry["latency_ms"] is not None]
        fastest = variants[min(ran)[1]] if ran else self.variant
        self.report(f"the fastest: {fastest}")
        prepared = compiled(module, inputs, fastest)  # again, from Inductor's cache: another would share its memory
        search = {"search_s": perf_counter() - begin, "tried": tried, "not_tried": len(variants) - len(tried)}
        prepared.compilation = {**asdict(fastest), **prepared.compilation, **search}
        return prepared

    def variants(self, inputs: tuple[Tensor, ...]) -> list[Variant]:
        """What `best` tries, in order: the configured one, those that promise most, and last those that tune, which took
        minutes each for networks of convolutions on an H200, where the others took seconds. On a CPU nothing is captured,
        which leaves two modes; without images there is one layout.
        """
        on_cpu, on_gpu = ("default", "max-autotune-no-cudagraphs"), ("reduce-overhead", "max-autotune", "default")
        modes = on_gpu if inputs[0].is_cuda else on_cpu
        layouts = ("contiguous", "channels_last") if any(x.dim() == 4 for x in inputs) else ("given",)
        rest = [Variant(mode, layout, freezing) for freezing, mode, layout in product((False, True), modes, layouts)]
        rest.sort(key=lambda variant: variant.mode in TUNING)
        given = _same(self.variant, inputs)
        return [self.variant, *(v for v in rest if _same(v, inputs) != given)]

    def prepare_training(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, inputs: tuple[Tensor, ...], target: Tensor
    ) -> Prepared:
        """Module and loss compiled together, forward and backward; the optimizer in its fused form."""
        if self.variant.freezing or self.best:
            raise Unsupported("system.freezing and system.best are for inference")
        if self.variant.layout != "given":
            module.to(memory_format=FORMATS[self.variant.layout])
        if not optimizer.state:
            for group in optimizer.param_groups:
                group["foreach"], group["fused"] = False, True
        torch._dynamo.reset()
        compiled = torch.compile(lambda *given: loss(module(*given[:-1]), given[-1]), mode=self.variant.mode, dynamic=False)
        step = CompiledStep(compiled, optimizer, self.variant.layout)
        try:
            with undone(module):
                for _ in range(WARM_UP_RUNS):
                    optimizer.zero_grad()  # a gradient lies where the next run of a CUDA Graph writes
                    step.differentiate(*inputs, target)
        except torch._dynamo.exc.BackendCompilerFailed as error:
            raise Unsupported(f"Inductor cannot compile it: {str(error).strip().splitlines()[0]}") from error
        return step


class OverBudget(BaseException):
    """The seconds are over. No Exception, since compilers take those for failures of their own and go on."""


@contextmanager
def _at_most(seconds: float | None) -> Iterator[None]:
    """Within, OverBudget is raised once so many seconds have passed. Only in the main thread, which alone hears signals."""
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise OverBudget

    handler = signal.signal(signal.SIGALRM, end)
    other = signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6), AGAIN_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *other)
        signal.signal(signal.SIGALRM, handler)


class CompiledStep(ModuleStep):
    """forward: compiled, of inputs and target, to the loss."""

    def __init__(self, forward: Any, optimizer: torch.optim.Optimizer, layout: str):
        super().__init__(forward, optimizer, lambda value, _: value)
        self.layout = layout

    def differentiate(self, *inputs: Tensor) -> Tensor:
        inputs = _in_layout(inputs, self.layout)
        torch.compiler.cudagraph_mark_step_begin()
        return super().differentiate(*inputs, inputs[-1]).clone()  # the next step overwrites what a CUDA Graph returns


class PreparedCompiled(PreparedModule):
    def __init__(self, call: Any, layout: str, captured: bool):
        super().__init__(call)
        self.layout, self.captured = layout, captured

    @torch.no_grad()
    def __call__(self, *inputs: Tensor) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        outputs = self.call(*_in_layout(inputs, self.layout))
        # With CUDA Graphs the next call overwrites the outputs; every other system's stay valid.
        return tree_map_only(Tensor, Tensor.clone, outputs) if self.captured else outputs


def compiled(module: nn.Module, inputs: tuple[Tensor, ...], variant: Variant) -> PreparedCompiled:
    """`module` compiled and warmed up, with the seconds that took and how much of it Inductor's cache held.

    What was compiled before is given up. Raises Unsupported where Inductor fails.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    if variant.layout != "given":
        module = copy.deepcopy(module).to(memory_format=FORMATS[variant.layout])
    begin = perf_counter()
    if variant.freezing:
        options = torch._inductor.list_mode_options(variant.mode) | {"freezing": True}
        call = torch.compile(module, options=options, dynamic=False)
    else:
        call = torch.compile(module, mode=variant.mode, dynamic=False)
    prepared = PreparedCompiled(call, variant.layout, variant.mode in CAPTURING and inputs[0].is_cuda)
    try:
        for _ in range(WARM_UP_RUNS):
            prepared(*inputs)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        raise Unsupported(f"Inductor cannot compile it: {first_line(error)}") from error
    _synchronize(inputs)
    found = torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"]
    prepared.compilation = {"compile_s": perf_counter() - begin, "cached_graphs": found}
    return prepared


@contextmanager
def _inductor_cache(module: nn.Module, inputs: tuple[Tensor, ...]) -> Iterator[None]:
    """Within, what Inductor keeps on disk lies in a folder of our cache, for this module and these inputs."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    key = "TORCHINDUCTOR_CACHE_DIR"
    before = os.environ.get(key)
    if before not in (None, default_cache_dir()):  # which Inductor sets itself once it has been asked
        yield
        return
    label = f"{type(module).__name__} {', '.join(describe(x).partition(' on ')[0] for x in inputs)}"
    of = {"module": hashlib.sha256(repr(module).encode()).hexdigest(), "inputs": [describe(x) for x in inputs]}
    with Cache().workspace("torch_compile", label, of | {"torch": torch.__version__}) as folder:
        os.environ[key] = str(folder)
        try:
            yield
        finally:
            if before is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = before


def _same(variant: Variant, inputs: tuple[Tensor, ...]) -> Variant:
    """The variant with the layout that `given` means for these inputs, and the mode that a CPU makes of it."""
    images = [x for x in inputs if x.dim() == 4]
    given = "channels_last" if images and not images[0].is_contiguous() else "contiguous" if images else "given"
    on_cpu = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}
    mode = variant.mode if inputs[0].is_cuda else on_cpu.get(variant.mode, variant.mode)
    layout = variant.layout if images and variant.layout != "given" else given
    return Variant(mode, layout, variant.freezing)


def _in_layout(inputs: tuple[Tensor, ...], layout: str) -> tuple[Tensor, ...]:
    if layout == "given":
        return inputs
    return tuple(x.contiguous(memory_format=FORMATS[layout]) if x.dim() == 4 else x for x in inputs)


def _milliseconds(prepared: Prepared, inputs: tuple[Tensor, ...]) -> float:
    """Median host time of one call that ends in a synchronisation."""
    samples: list[float] = []
    begin = perf_counter()
    while len(samples) < SAMPLES or (perf_counter() - begin < SAMPLE_SECONDS and len(samples) < MOST_SAMPLES):
        start = perf_counter()
        prepared(*inputs)
        _synchronize(inputs)
        samples.append((perf_counter() - start) * 1e3)
    return median(samples)


def _synchronize(inputs: tuple[Tensor, ...]) -> None:
    if inputs[0].is_cuda:
        torch.cuda.synchronize(inputs[0].device)
