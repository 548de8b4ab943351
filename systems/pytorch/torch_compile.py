"""torch.compile through Inductor: one variant, or the fastest of all that it offers."""

import copy
import hashlib
import inspect
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from conf import not_one_of
from conf.text import first_line
from systems.base import BadOption, Compilation, Loss, Prepared, PreparedModule, System, Unsupported
from systems.cache import JSON, Cache, code_of
from systems.notice import Notice
from systems.preparing import TRITONS_FOLDER, OverBudget, at_most, variable_kept
from systems.profiling.measurements import conditions
from systems.scheduling.decision import Decision, DecisionRow, rows
from systems.scheduling.graph.program import describe
from systems.training.step import ModuleStep, undone

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
CAPTURING = ("reduce-overhead", "max-autotune")  # on a GPU
TUNING = ("max-autotune", "max-autotune-no-cudagraphs")  # which take minutes where the others take seconds
LAYOUTS = ("given", "contiguous", "channels_last")
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
WARM_UP_RUNS = 3  # CUDA Graph Trees warm up, record and replay in the first three calls
SAMPLES, SAMPLE_SECONDS, MOST_SAMPLES = 5, 0.3, 100
SEARCH = "search.json"  # of a search's artefact


@dataclass(frozen=True)
class Variant:
    """One way to compile.

    Args:
        mode: one of `MODES`.
        layout: one of `LAYOUTS`; given is the layout of the module and the inputs as they come.
        freezing: weights become constants, and what depends on them alone is computed once.
    """

    mode: str
    layout: str
    freezing: bool

    def __str__(self) -> str:
        return f"{self.mode}, layout {self.layout}{', frozen' if self.freezing else ''}"


@dataclass(frozen=True)
class Search:
    """What a search among the variants left.

    Args:
        decision: the variants that were tried, by name, and the fastest.
        num_untried: variants for which no time was left.
        seconds: of the search.
    """

    decision: DecisionRow
    num_untried: int
    seconds: float

    @classmethod
    def read(cls, file: Path) -> "Search":
        document = json.loads(file.read_text(encoding="utf-8"))
        return cls(DecisionRow.from_json(document.pop("decision")), **document)

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(asdict(self)), encoding="utf-8")


class TorchCompile(System):
    """torch.compile in one variant or, with `best`, in the fastest of all variants.

    Inductor's own cache lies in ours, for each module and inputs, unless TORCHINDUCTOR_CACHE_DIR names another place. What
    Inductor reads back from there are pickles of its own.

    Args:
        mode, layout, freezing: as `Variant`.
        best: whether to search. `learn` does, and `prepare` compiles the variant that won.
        budget_s: seconds that a search may take. The configured variant is tried in any case, and first.
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
            if wrong := not_one_of(f"system.{option}", value, valid):
                raise BadOption(wrong)
        if not 0 <= budget_s < float("inf"):
            raise BadOption(f"system.budget_s is {budget_s}: it is a number of seconds, not negative")
        self.variant, self.best, self.budget_s = Variant(mode, layout, freezing), best, budget_s

    def unsupported(self, device: str) -> str | None:
        if not any(shutil.which(compiler) for compiler in ("g++", "c++", "clang++", "gcc")):
            return "Inductor needs a C++ compiler (g++ or clang++) on the PATH"
        return None

    @property
    def learns(self) -> bool:
        return self.best

    def learn(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Search, and leave in the cache which variant won and what each of them took."""
        if self.best:
            with _inductor_cache(module, inputs):
                self._search(module, inputs)

    def prepare(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> Prepared:
        with _inductor_cache(module, inputs):
            if not self.best:
                return compiled(module, inputs, self.variant)
            search = self._search(module, inputs, is_in_place=True)
            variant = next(v for v in self.variants(inputs) if str(v) == search.decision.chosen)
            # Anew, from Inductor's cache: what the search compiled would share its memory.
            prepared = compiled(module, inputs, variant)
            assert prepared.compilation is not None
            prepared.compilation = replace(
                prepared.compilation,
                search_s=search.seconds,
                decisions=(search.decision,),
                num_untried=search.num_untried,
            )
            return prepared

    def _search(self, module: nn.Module, inputs: tuple[Tensor, ...], is_in_place: bool = False) -> Search:
        """The search that the cache holds, made now if it holds none.

        Args:
            is_in_place: this process goes on to be timed, so that searching in it calls for a Notice.
        """

        def make(folder: Path) -> None:
            if is_in_place:
                message = "torch_compile tried its variants in the process that is timed, since no `learn` had left a choice"
                warnings.warn(message, category=Notice, stacklevel=2)
            self._try_variants(module, inputs).write(folder / SEARCH)

        made_of: dict[str, JSON] = {
            **_identity(module, inputs),
            "strides": [list(x.stride()) for x in inputs],
            "conditions": conditions(inputs[0].device),
            "configured": str(self.variant),
            "budget_s": self.budget_s,
            "code": code_of(__name__),
        }
        with Cache().artefact("torch_compile_search", _label(module, inputs), made_of, make) as artefact:
            return Search.read(artefact.folder / SEARCH)

    def _try_variants(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> Search:
        """Compile and time the variants in order, within the budget.

        Invariant: the configured variant is tried to its end, whatever the budget. A later one begins only if the longest so
        far would still fit, and is interrupted where the budget ends. One that fails, however it fails, has a reason in the
        place of its time. Where a captured one failed, those without a CUDA Graph go before the others.

        Raises:
            Exception: where all fail, what the configured variant raises.
        """
        begin, longest = perf_counter(), 0.0
        milliseconds: dict[str, float | None] = {}
        reasons: dict[str, str] = {}
        variants = self.variants(inputs)
        remaining = list(variants)
        while remaining:
            variant = remaining[0]
            spent, name = perf_counter() - begin, str(variant)
            if milliseconds and spent + longest > self.budget_s:
                break
            del remaining[0]
            number = len(milliseconds) + 1
            self.report(f"variant {number} of {len(variants)}, {spent:.0f} of {self.budget_s:.0f} s: {name}")
            try:
                limit = at_most(self.budget_s - spent if milliseconds else None)
                with limit, closing(compiled(module, inputs, variant)) as prepared:
                    milliseconds[name] = _milliseconds(prepared, inputs)
            except OverBudget:
                milliseconds[name], reasons[name] = None, f"not compiled within the budget of {self.budget_s:g} s"
            except Exception as error:  # as when a kernel of Inductor's fails to start, which is no fault of the others
                milliseconds[name], reasons[name] = None, first_line(error)
                if variant.mode in CAPTURING:
                    remaining.sort(key=lambda other: other.mode in CAPTURING)
            longest = max(longest, perf_counter() - begin - spent)
        times = {name: t for name, t in milliseconds.items() if t is not None}
        if not times:
            compiled(module, inputs, self.variant).close()
        fastest = min(times, key=times.__getitem__, default=str(self.variant))
        self.report(f"the fastest: {fastest}")
        (row,) = rows([Decision("torch_compile", _label(module, inputs), (), milliseconds, fastest, reasons)])
        return Search(row, len(remaining), perf_counter() - begin)

    def variants(self, inputs: tuple[Tensor, ...]) -> list[Variant]:
        """The variants that a search tries, in order: the configured one, those that take seconds, those that tune.

        Tuning took minutes for networks of convolutions on an H200, where the other modes took seconds. On a GPU what is not
        captured comes last: of no network that was measured at batch 1 was it the fastest. On a CPU nothing is captured,
        which leaves two modes; without images there is one layout.
        """
        on_cpu, on_gpu = ("default", "max-autotune-no-cudagraphs"), ("reduce-overhead", "max-autotune", "default")
        modes = on_gpu if inputs[0].is_cuda else on_cpu
        layouts = ("contiguous", "channels_last") if any(x.dim() == 4 for x in inputs) else ("given",)
        rest = [Variant(mode, layout, freezing) for mode, freezing, layout in product(modes, (False, True), layouts)]
        configured = _canonical(self.variant, inputs)
        return [self.variant, *(v for v in rest if _canonical(v, inputs) != configured)]

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
        forward = torch.compile(lambda *args: loss(module(*args[:-1]), args[-1]), mode=self.variant.mode, dynamic=False)
        step = CompiledStep(forward, optimizer, self.variant.layout)
        try:
            with undone(module):
                for _ in range(WARM_UP_RUNS):
                    optimizer.zero_grad()  # a gradient lies where the next run of a CUDA Graph writes
                    step.differentiate(*inputs, target)
        except torch._dynamo.exc.BackendCompilerFailed as error:
            raise Unsupported(f"Inductor cannot compile it: {_cause(error)}") from error
        return step


class CompiledStep(ModuleStep):
    """A step of training. forward: compiled, from inputs and target to the loss."""

    def __init__(self, forward: Callable[..., Tensor], optimizer: torch.optim.Optimizer, layout: str):
        super().__init__(forward, optimizer, lambda value, _: value)
        self.layout = layout

    def differentiate(self, *inputs: Tensor) -> Tensor:
        inputs = _in_layout(inputs, self.layout)
        torch.compiler.cudagraph_mark_step_begin()
        return super().differentiate(*inputs, inputs[-1]).clone()  # the next step overwrites what a CUDA Graph returns


class PreparedCompiled(PreparedModule):
    """A compiled module. call: it, with inputs in `layout`. is_captured: a call replays a CUDA Graph."""

    def __init__(self, call: Callable[..., Any], layout: str, is_captured: bool):
        super().__init__(call)
        self.layout, self.is_captured = layout, is_captured
        self.compilation = Compilation(layout=layout)

    @torch.no_grad()
    def __call__(self, *inputs: Tensor) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        outputs = self.call(*_in_layout(inputs, self.layout))
        # With CUDA Graphs the next call overwrites the outputs; every other system's stay valid.
        return tree_map_only(Tensor, Tensor.clone, outputs) if self.is_captured else outputs


def compiled(module: nn.Module, inputs: tuple[Tensor, ...], variant: Variant) -> PreparedCompiled:
    """`module` compiled and warmed up. Earlier compiled modules of this process are given up.

    Raises:
        Unsupported: Inductor fails.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    if variant.layout != "given":
        module = copy.deepcopy(module).to(memory_format=FORMATS[variant.layout])
    begin = perf_counter()
    call = torch.compile(module, mode=variant.mode, dynamic=False)
    prepared = PreparedCompiled(call, variant.layout, variant.mode in CAPTURING and inputs[0].is_cuda)
    try:
        # As an option of torch.compile, freezing would not reach Dynamo, and no weight would become a constant.
        with torch._inductor.config.patch(freezing=variant.freezing):
            for _ in range(WARM_UP_RUNS):
                prepared(*inputs)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        raise Unsupported(f"Inductor cannot compile it: {_cause(error)}") from error
    _synchronize(inputs)
    num_cached_graphs = torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"]
    seconds = perf_counter() - begin
    prepared.compilation = Compilation(compile_s=seconds, num_cached_graphs=num_cached_graphs, **asdict(variant))
    return prepared


def _cause(error: Exception) -> str:
    """Why Inductor failed, in one line: of a process that compiled for it the last line, which names the error."""
    details = str(getattr(getattr(error, "inner_exception", None), "details", ""))
    return first_line("\n".join(reversed(details.splitlines())) or error)


@contextmanager
def _inductor_cache(module: nn.Module, inputs: tuple[Tensor, ...]) -> Iterator[None]:
    """Within, Inductor's own cache lies in a folder of ours, for this module and these inputs."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    key = "TORCHINDUCTOR_CACHE_DIR"
    with variable_kept(TRITONS_FOLDER):
        if os.environ.get(key) not in (None, default_cache_dir()):  # which Inductor sets itself once it has been asked
            yield
            return
        digest = hashlib.sha256(repr(module).encode()).hexdigest()
        made_of: dict[str, JSON] = {"module": digest, "inputs": [describe(x) for x in inputs], "torch": torch.__version__}
        with Cache().workspace("torch_compile", _label(module, inputs), made_of) as folder, variable_kept(key, str(folder)):
            yield


def _label(module: nn.Module, inputs: tuple[Tensor, ...]) -> str:
    return f"{type(module).__name__} {', '.join(describe(x).partition(' on ')[0] for x in inputs)}"


def _identity(module: nn.Module, inputs: tuple[Tensor, ...]) -> dict[str, JSON]:
    """What the choice of a variant depends on: the module's structure and code, and its inputs, but no weight's value.

    Two modules that it cannot tell apart share a choice, which costs time at most: the module itself is always compiled.
    """
    digest = hashlib.sha256(repr(module).encode())
    for name, tensor in sorted(module.state_dict().items()):
        if isinstance(tensor, Tensor):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}\n".encode())
    for kind in sorted({type(m) for m in module.modules()}, key=lambda kind: f"{kind.__module__}.{kind.__qualname__}"):
        if kind.__module__.partition(".")[0] != "torch":
            digest.update(_source(kind).encode())
    return {"module": digest.hexdigest(), "inputs": [describe(x) for x in inputs]}


def _source(kind: type) -> str:
    """The code of a class; its name where there is none to read, as of one that was typed into an interpreter."""
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return kind.__qualname__


def _canonical(variant: Variant, inputs: tuple[Tensor, ...]) -> Variant:
    """The variant with the layout that `given` means for these inputs, and the mode that a CPU makes of its own."""
    images = [x for x in inputs if x.dim() == 4]
    own_layout = "given" if not images else "contiguous" if images[0].is_contiguous() else "channels_last"
    on_cpu = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}
    mode = variant.mode if inputs[0].is_cuda else on_cpu.get(variant.mode, variant.mode)
    layout = variant.layout if images and variant.layout != "given" else own_layout
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
