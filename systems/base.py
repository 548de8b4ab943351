"""What every system under test is. It stands on nothing above it: neither schedules nor programs are known here."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from inspect import Parameter, signature
from time import perf_counter
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor, nn

import conf

Loss: TypeAlias = Callable[[Any, Tensor], Tensor]  # (the module's output, the target) -> a single number


class Unsupported(Exception):
    """This system cannot run this model on this device with this installation; the message is the reason, in one line."""

    def __init__(self, reason: str):
        super().__init__(" ".join(reason.split()))


class BadOption(ValueError):
    """A system has no option of that name, or the option does not take that value."""


@dataclass(frozen=True)
class Compilation:
    """What a compiler says of its work; None for what it does not do.

    Args:
        export_s: seconds that exporting the model took, whenever that was.
        is_exported_now: the model was exported by this preparation, and not read from the cache.
        compile_s: seconds that compiling took, whenever that was.
        is_compiled_now: it was compiled by this preparation, and not read from the cache.
        num_cached_graphs: compiled graphs that were read from the compiler's own cache.
        trials: candidates that tuning has measured.
        tuning_s: seconds that tuning took.
        tuned: functions with a tuned kernel.
        functions: functions of the compiled model.
        operators: operators of the exported model.
        error: the largest relative error of the exported model against eager.
        not_compared: why there is no such error.
        providers: operators by the part of the compiler that runs them.
        search_s: seconds that trying alternatives took.
        mode: the compiler's own mode.
        layout: the memory layout compiled for.
        freezing: weights were compiled in as constants.
        decisions: the alternatives that were tried (rows of systems.scheduling.decision).
        num_untried: alternatives for which no time was left.
        handed_over: the system that executes the model in the place of the one that was asked for.
    """

    export_s: float | None = None
    is_exported_now: bool | None = None
    compile_s: float | None = None
    is_compiled_now: bool | None = None
    num_cached_graphs: int | None = None
    trials: int | None = None
    tuning_s: float | None = None
    tuned: int | None = None
    functions: int | None = None
    operators: int | None = None
    error: float | None = None
    not_compared: str | None = None
    providers: dict[str, int] | None = None
    search_s: float | None = None
    mode: str | None = None
    layout: str | None = None
    freezing: bool | None = None
    decisions: tuple[object, ...] | None = None
    num_untried: int | None = None
    handed_over: str | None = None

    def to_json(self) -> dict[str, object]:
        """What a record holds: the fields that are known, `is_compiled_now` as `compiled_now`."""
        return {name.removeprefix("is_"): value for name, value in asdict(self).items() if value is not None}


class Prepared(ABC):
    """A module made ready for one shape of inputs; call it in the module's place."""

    is_captured: bool = False  # a call is one replay of one CUDA Graph
    compilation: Compilation | None = None
    operator_threads: int | None = None  # that one operator has on a CPU, where they are not all of torch's

    @property
    def memory(self) -> dict[str, int]:
        """Bytes by name that the system itself knows of, those that it reserves beside torch's allocator among them."""
        return {}

    @abstractmethod
    def __call__(self, *inputs: Tensor) -> Any: ...

    def without_copies(self, *inputs: Tensor) -> Callable[[], object]:
        """A call on these inputs, less the copies of inputs and outputs where its own CUDA Graph makes them."""
        return partial(self, *inputs)

    def close(self) -> None:
        """Give back threads and device memory."""

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError(f"a {type(self).__name__} cannot be copied or pickled: prepare a copy of its module")


class PreparedModule(Prepared):
    """A system that is called like a module and keeps its own memory in torch's allocator."""

    def __init__(self, call: Any):
        self.call = call

    @torch.no_grad()
    def __call__(self, *inputs: Tensor) -> Any:
        return self.call(*inputs)

    def close(self) -> None:
        self.call = None


class System(ABC):
    """One way of executing a model. `prepare` may take long; calling the result is what is measured.

    The parameters of a subclass's `__init__` are its options. Each has a default, whose type its values have.
    """

    name: str
    report: Callable[[str], None] = staticmethod(logging.getLogger("opweave").info)  # hears where a long preparation stands
    clock: Callable[[], float] = staticmethod(perf_counter)  # seconds, of which a search has a budget
    own_randomness = False  # in training it draws other random numbers than eager execution from the same state

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        """Check the types of options, whichever way a system is made.

        Raises:
            BadOption: there is no such option, or it does not take a value of that type.
        """
        init = signature(cls.__init__)
        defaults = {p.name: p.default for p in init.parameters.values() if p.default is not Parameter.empty}
        takes_others = any(p.kind is Parameter.VAR_KEYWORD for p in init.parameters.values())  # and checks them itself
        values = dict(zip(defaults, arguments, strict=False)) | options
        if mistake := conf.mistake(
            "system", defaults, {k: v for k, v in values.items() if k in defaults or not takes_others}
        ):
            raise BadOption(mistake)
        return super().__new__(cls)

    def unsupported(self, device: str) -> str | None:
        """Why this system cannot run on this kind of device ("cpu" or "cuda") or installation, or None."""
        return None

    def check_supported(self, inputs: tuple[Tensor, ...]) -> None:
        """Raise Unsupported where this system cannot run on the device of these inputs, of which there is one."""
        if reason := self.unsupported(inputs[0].device.type):
            raise Unsupported(reason)

    @property
    def learns(self) -> bool:
        """Does it, with its options, search, tune, profile or choose by measuring?"""
        return False

    def learn(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Leave in the cache all that `prepare` needs to have measured.

        It runs in a process that is thrown away, since profilers and searches slow the process that they ran in.

        Args:
            module, inputs: as for `prepare`.

        Raises:
            Unsupported: this system cannot run this module.
        """

    @abstractmethod
    def prepare(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> Prepared:
        """Make a module ready. What `learn` left in the cache is read; what the cache lacks is learned in place.

        Args:
            module: in eval form.
            inputs: of the shapes, dtypes and device that calls will have.

        Raises:
            Unsupported: this system cannot run this module.
        """

    def prepare_training(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, inputs: tuple[Tensor, ...], target: Tensor
    ) -> Prepared:
        """Make one step of training ready. Preparing changes neither the module nor the optimizer.

        Args:
            module: in training form.
            optimizer: over parameters of the module.
            loss: a function of the module's output and the target.
            inputs, target: of the shapes, dtypes and device that calls will have.

        Returns:
            A call of (*inputs, target), which updates the module by the optimizer and returns the loss.

        Raises:
            Unsupported: this system cannot train, or not this module.
        """
        raise Unsupported(f"{self.name} runs inference only")
