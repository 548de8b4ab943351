"""What a plan file says beside its schedule: how the program that is scheduled came out of the captured one."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from sys import float_info
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from conf.text import first_line
from systems.cache import JSON
from systems.kernels.binaries import Binary, Library, Stored
from systems.kernels.kernel import Kernel
from systems.profiling.measurements import conditions
from systems.profiling.timing import Timer, name_of
from systems.scheduling.decision import kind_of
from systems.scheduling.graph.program import Program, describe
from systems.scheduling.graph.stored_program import NotStorable, answer_of, description, from_document, to_document
from systems.scheduling.graph.structure import digest, structure
from systems.scheduling.passes.rewriting import KINDS, SWITCHES
from systems.tolerance import distance

LAST_DIGITS = 64.0  # units of rounding by which the same kernels may differ from run to run


class Misfit(ValueError):
    """A plan is not for this program; the message names the field that differs."""


@dataclass(frozen=True)
class Recipe:
    """How the passes came to their program.

    Args:
        fingerprint: of the captured program, its inputs, the device, the libraries and the arithmetic.
        switches: of the passes that ran.
        choices: alternatives by `Decision.place`, where they are not the passes' own.
        times: every measured time that a pass asked for, milliseconds by name.
        module: a digest of what the captured module is, by `description`; empty where it is not known.
        captured: the captured program by `stored_program`; empty where it cannot be stored.
        binaries: kernels of this project that the plan executes, as they were compiled.
        weights: a digest of those with which it was held to the reference.
    """

    fingerprint: Mapping[str, JSON]
    switches: tuple[str, ...]
    choices: Mapping[str, str]
    times: Mapping[str, float]
    module: str = ""
    captured: Mapping[str, JSON] = field(default_factory=dict)
    binaries: tuple[Binary, ...] = ()
    weights: str = ""

    def to_json(self) -> dict[str, JSON]:
        binaries: list[JSON] = [[*binary.to_json()] for binary in self.binaries]
        return asdict(replace(self, binaries=())) | {"switches": [*self.switches], "binaries": binaries}

    @classmethod
    def from_json(cls, document: Any) -> "Recipe":
        """Raises ValueError where `document` is not of `to_json`; the message begins with the field."""
        if not isinstance(document, dict):
            raise ValueError("recipe is no mapping")
        fields: dict[str, Any] = {"module": "", "captured": {}, "binaries": [], "weights": ""} | document
        mappings, lists = ("fingerprint", "choices", "times", "captured"), ("switches", "binaries")
        for kind, names in {dict: mappings, list: lists}.items():
            if strange := [name for name in names if not isinstance(fields.get(name), kind)]:
                raise ValueError(f"{strange[0]} is no {'mapping' if kind is dict else 'list'}")
        switches, choices, times = fields["switches"], fields["choices"], fields["times"]
        if strange := [switch for switch in switches if switch not in SWITCHES]:
            raise ValueError(f"switches has {strange[0]!r}, which is no switch of a pass")
        if strange := [place for place, name in choices.items() if kind_of(place) not in KINDS or not isinstance(name, str)]:
            raise ValueError(f"choices has {strange[0]!r}: {choices[strange[0]]!r}, which is no decision of a pass")
        if strange := [name for name, t in times.items() if type(t) not in (int, float) or not 0 <= t <= float_info.max]:
            raise ValueError(f"times has {times[strange[0]]!r}, which is no number of milliseconds")
        try:
            binaries = tuple(map(Binary.from_json, fields["binaries"]))
        except ValueError as error:
            raise ValueError(f"binaries: {error}") from error
        milliseconds = {name: float(t) for name, t in times.items()}
        captured, module, weights = fields["captured"], str(fields["module"]), str(fields["weights"])
        return cls(fields["fingerprint"], tuple(switches), choices, milliseconds, module, captured, binaries, weights)

    def of_module(self, program: Program, module: nn.Module) -> "Recipe":
        """This recipe with the captured program of a module; without it where it cannot be stored."""
        try:
            return replace(self, module=digest(description(module)), captured=to_document(program, module))
        except NotStorable:
            return self

    def program(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> Program | None:
        """The captured program over a module, so that nobody has to trace it; None where it is another module's.

        Invariant: it computes what the module does, to the last digits, on these inputs. So the module's code may depend on
        what its description does not know.

        Raises:
            ValueError: what is stored is no such program.
        """
        is_for_these = self.fingerprint.get("inputs") == _described(inputs) and self.module == digest(description(module))
        if not self.captured or not is_for_these:
            return None
        try:
            program = from_document(self.captured, module, inputs)
            with torch.no_grad():
                outputs = tree_leaves(program.unflatten(program.run(inputs)))
        except torch.OutOfMemoryError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
            raise ValueError(f"captured is no program: {first_line(error)}") from error
        return program if _are_of(module, inputs, outputs) else None

    def check(self, program: Program) -> None:
        """Raises Misfit unless it is for this captured program, on this device, with these libraries."""
        for name, own in fingerprint(program).items():
            if self.fingerprint.get(name) != own:
                raise Misfit(f"{name} is {self.fingerprint.get(name)!r} in the plan, and {own!r} here")


@torch.no_grad()
def _are_of(module: nn.Module, inputs: tuple[Tensor, ...], outputs: Sequence[object]) -> bool:
    """Does the module compute these outputs?"""
    expected = tree_leaves(answer_of(module, inputs))
    return len(outputs) == len(expected) and all(map(_is_same, outputs, expected))


def _is_same(a: object, b: object) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return type(a) is type(b) and bool(a == b)
    if (a.shape, a.dtype, a.stride()) != (b.shape, b.dtype, b.stride()):
        return False
    rounding = torch.finfo(a.dtype).eps if a.dtype.is_floating_point else 0.0
    return distance(a, b).norm <= LAST_DIGITS * rounding or torch.equal(a, b)


def binaries_of(*programs: Program) -> tuple[Binary, ...]:
    """Those of the programs' kernels, each once. Compiles what Triton's cache lacks."""
    library = Library()
    for program in programs:
        for call in program.calls:
            if isinstance(call.function, Kernel):
                library.compile(call.function.launch(*(program.value(a) for a in call.args)))
    return library.collected()


def stored(program: Program, binaries: Iterable[Binary]) -> Program:
    """The program with its kernels launched from these binaries."""
    library = Library(binaries)
    calls = [
        replace(call, function=Stored(call.function, library)) if isinstance(call.function, Kernel) else call
        for call in program.calls
    ]
    return Program(program.graph, calls, program.outputs, program.output_spec, program.examples, program.derived)


def fingerprint(program: Program) -> dict[str, JSON]:
    """What has to be the same for a plan to hold.

    Args:
        program: as captured, before any pass.
    """
    return {"inputs": _described(program.examples), "structure": digest(structure(program)), **conditions(program.device)}


def _described(inputs: Sequence[Tensor]) -> list[JSON]:
    return [f"{describe(x)}, strides {list(x.stride())}" for x in inputs]


class NotingTimer(Timer):
    """A timer that notes what it was asked, in `times`."""

    def __init__(self, device: torch.device, report: Callable[[str], None] = lambda _: None):
        super().__init__(device, report)
        self.times: dict[str, float] = {}

    def known(self, signature: str, measure: Callable[[], float]) -> float:
        self.times[name_of(signature)] = milliseconds = super().known(signature, measure)
        return milliseconds


class RecordedTimer(Timer):
    """A timer that knows the times of a recipe alone. It raises Misfit where it is asked for another."""

    def __init__(self, device: torch.device, times: Mapping[str, float]):
        super().__init__(device)
        self.times = times

    def known(self, signature: str, measure: Callable[[], float]) -> float:
        if (name := name_of(signature)) not in self.times:
            raise Misfit(f"times lacks {signature:.80}")
        return self.times[name]

    def find(self, signature: str) -> float | None:
        return self.times.get(name_of(signature))
