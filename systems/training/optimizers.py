"""torch.optim's SGD, Adam and AdamW as operators over tensors at fixed addresses."""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from conf.text import counted
from systems.base import Unsupported

from .update import Update

Settings: TypeAlias = "Mapping[str, object]"  # of a parameter group, as torch.optim has them: lr, momentum, betas...


class StaticOptimizer(Update):
    """A torch.optim optimizer's step in a form that is captured once and replayed.

    On a CPU a step is the optimizer's own implementation, to the bit. On a GPU it is torch's fused one, which reads learning
    rate and step counter from the device.

    Invariant: after `refresh`, `moments` are the very tensors of `optimizer.state`, and `rates` hold the learning rates of
    the optimizer's parameter groups. Both may change between steps.

    Args:
        parameters: Those of the optimizer's that a step has gradients for; a step leaves the others alone.

    Raises:
        Unsupported: Another optimizer, or settings with which its step cannot be captured.
    """

    kind: ClassVar[type[torch.optim.Optimizer]]
    fixed: ClassVar[tuple[str, ...]]  # settings of a parameter group that must not change after the capture

    @staticmethod
    def of(optimizer: torch.optim.Optimizer, parameters: Collection[Tensor]) -> StaticOptimizer:
        """The static form of this optimizer; raises Unsupported."""
        for kind in (StaticSGD, StaticAdamW, StaticAdam):
            if type(optimizer) is kind.kind:
                return kind(optimizer, parameters)
        raise Unsupported(f"{type(optimizer).__name__} steps cannot be scheduled: SGD's, Adam's and AdamW's can")

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Collection[Tensor]):
        self.optimizer, self.target = optimizer, f"torch.optim.{self.name}"
        if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:  # type: ignore[attr-defined]
            raise Unsupported("the optimizer has step hooks, which a captured step would not run")
        wanted = {id(p) for p in parameters}
        self.groups = [[p for p in group["params"] if id(p) in wanted] for group in optimizer.param_groups]
        self.settings = [self._settings(group) for group in optimizer.param_groups]
        self.moments: dict[Tensor, dict[str, Tensor]] = {}
        self.rates: list[Tensor | None] = []  # by group: the learning rate on the GPU, [], which a captured step reads
        self.entries: list[Any] | None = None  # of the optimizer's state after the last `refresh`
        self.last_rates: list[float | None] = [None] * len(self.groups)  # by group, as last written
        for group, chosen in zip(optimizer.param_groups, self.groups, strict=True):
            if group.get("differentiable"):
                raise Unsupported("a differentiable optimizer's step cannot be captured")
            if any(p.is_complex() for p in chosen):
                raise Unsupported("complex parameters are not supported")
            on_gpu = bool(chosen) and chosen[0].is_cuda
            self.rates.append(torch.zeros((), dtype=torch.float32, device=chosen[0].device) if on_gpu else None)
            for p in chosen:
                state = optimizer.state.get(p, {})
                if reason := self._no_first_step(group, state):
                    raise Unsupported(reason)
                initial = self._initial(group, p)
                self.moments[p] = {k: state[k] if fits(state.get(k), new) else new for k, new in initial.items()}

    def group_of(self, parameter: Tensor) -> int:
        return next(i for i, chosen in enumerate(self.groups) if any(p is parameter for p in chosen))

    def update(
        self,
        group: int,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        moments: dict[str, list[Tensor]],
        rate: Tensor | None,
    ) -> None:
        """The operator: one step of some parameters of one group.

        Args:
            group: Its number.
            parameters: [P].
            gradients: [P], of the parameters' shapes.
            moments: As `moments_of` returns them: by name, [P].
            rate: The learning rate on the GPU, []; None on a CPU.
        """
        settings = self.optimizer.param_groups[group]
        aligned = [_aligned(g, p) for g, p in zip(gradients, parameters, strict=True)]
        # Not foreach: it gives the same results, but may write into the gradients.
        options: dict[str, object] = {"foreach": False, "fused": settings["fused"], "lr": settings["lr"]}
        if rate is not None:
            options |= {"fused": True, "lr": rate}
        self._update(settings, list(parameters), aligned, moments, options)

    def refresh(self) -> None:
        """Before each step: take over learning rates, and moments that were loaded or assigned since the last step.

        Raises:
            ValueError: A setting that the capture fixed has changed.
        """
        groups = self.optimizer.param_groups
        if len(groups) != len(self.groups):
            raise ValueError(
                f"the step was prepared for {counted(len(self.groups), 'parameter group')}, now there are {len(groups)}"
            )
        for i, group in enumerate(groups):
            if (now := self._settings(group)) != self.settings[i]:
                name = next(k for k in now if now[k] != self.settings[i][k])
                raise ValueError(
                    f"{name} of parameter group {i} has changed from {self.settings[i][name]} to {now[name]} since the step "
                    "was prepared: prepare it again"
                )
            self._set_rate(i, group["lr"])
        entries = self._entries()
        if self.entries is not None and len(entries) == len(self.entries) and all(map(operator.is_, entries, self.entries)):
            return  # this comes before each step, so it compares whole lists first
        for group, chosen in zip(groups, self.groups, strict=True):
            for p in chosen:
                if moments := self.moments[p]:
                    self._take_over(group, moments, self.optimizer.state[p])
        self.entries = self._entries()

    def finish(self) -> None:
        """Learning-rate schedulers warn of an optimizer that has taken no step."""
        self.optimizer._opt_called = True  # type: ignore[attr-defined]

    def _entries(self) -> list[Any]:
        """All parameters and moments in the optimizer's state."""
        return [x for p, moments in self.optimizer.state.items() for x in (p, *moments.values())]

    def _take_over(self, group: Settings, moments: dict[str, Tensor], state: MutableMapping[str, object]) -> None:
        """Copy one parameter's state of the optimizer into its moments, and put the moments in its place."""
        for name, moment in moments.items():
            loaded = state.get(name)
            if loaded is moment:
                continue
            if loaded is not None:
                assert isinstance(loaded, Tensor), f"{name} in the optimizer's state is no tensor"
                moment.copy_(loaded)
            elif reason := self._no_first_step(group, state):
                raise ValueError(reason)
            else:
                moment.zero_()
            state[name] = moment

    def _set_rate(self, group: int, rate: float | Tensor) -> None:
        on_device = self.rates[group]
        if on_device is None:
            return
        if isinstance(rate, Tensor):
            on_device.copy_(rate, non_blocking=True)
        elif rate != self.last_rates[group]:
            on_device.fill_(rate)
            self.last_rates[group] = rate

    def _settings(self, group: Settings) -> dict[str, object]:
        settings: dict[str, object] = {name: group[name] for name in self.fixed}
        betas = settings.get("betas")
        if any(isinstance(x, Tensor) for x in (*settings.values(), *(betas if isinstance(betas, tuple | list) else ()))):
            raise Unsupported("of the optimizer's settings only the learning rate may be a tensor")
        return settings

    @abstractmethod
    def _initial(self, group: Settings, parameter: Tensor) -> dict[str, Tensor]:
        """The moments of a parameter before its first step."""

    def _no_first_step(self, group: Settings, state: Mapping[str, object]) -> str | None:
        """Why a parameter with this state cannot begin with a step like all others, or None."""
        return None

    @abstractmethod
    def _update(
        self,
        group: Settings,
        parameters: list[Tensor],
        gradients: list[Tensor],
        moments: dict[str, list[Tensor]],
        options: Any,
    ) -> None: ...


class StaticSGD(StaticOptimizer):
    name = "SGD"
    kind = torch.optim.SGD
    fixed = ("momentum", "dampening", "weight_decay", "nesterov", "maximize", "fused")

    def _initial(self, group: Settings, parameter: Tensor) -> dict[str, Tensor]:
        # Zeros make the first step's momentum the gradient, as in torch.optim.
        return {"momentum_buffer": torch.zeros_like(parameter)} if group["momentum"] else {}

    def _no_first_step(self, group: Settings, state: Mapping[str, object]) -> str | None:
        if group["momentum"] and group["dampening"] and state.get("momentum_buffer") is None:
            return "with dampening SGD's first step differs from all others: take it in eager mode"
        return None

    def _update(
        self,
        group: Settings,
        parameters: list[Tensor],
        gradients: list[Tensor],
        moments: dict[str, list[Tensor]],
        options: Any,
    ) -> None:
        settings: Any = {k: group[k] for k in ("weight_decay", "momentum", "dampening", "nesterov", "maximize")}
        buffers: list[Tensor | None] = [*moments.get("momentum_buffer", [None] * len(parameters))]
        sgd(parameters, gradients, buffers, **settings, **options)


class _AnyAdam(StaticOptimizer):
    """What Adam and AdamW share: all but where the decay goes."""

    function: ClassVar[Callable[..., None]]

    def _initial(self, group: Settings, parameter: Tensor) -> dict[str, Tensor]:
        names = ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else []))
        # The counter is on the device, as with capturable=True, since a captured step cannot wait for the host.
        step = torch.zeros((), dtype=torch.float32, device=parameter.device)
        return {"step": step, **{name: torch.zeros_like(parameter) for name in names}}

    def _update(
        self,
        group: Settings,
        parameters: list[Tensor],
        gradients: list[Tensor],
        moments: dict[str, list[Tensor]],
        options: Any,
    ) -> None:
        betas: Any = group["betas"]
        settings: Any = {k: group[k] for k in ("amsgrad", "weight_decay", "eps", "maximize", "capturable")}
        first, second, largest = (moments.get(k, []) for k in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"))
        type(self).function(
            parameters,
            gradients,
            first,
            second,
            largest,
            moments["step"],
            beta1=betas[0],
            beta2=betas[1],
            **settings,
            **options,
        )


class StaticAdamW(_AnyAdam):
    name = "AdamW"
    kind = torch.optim.AdamW
    fixed = ("betas", "eps", "weight_decay", "amsgrad", "maximize", "fused", "capturable")
    function = staticmethod(adamw)


class StaticAdam(_AnyAdam):
    name = "Adam"
    kind = torch.optim.Adam
    fixed = (*StaticAdamW.fixed, "decoupled_weight_decay")
    function = staticmethod(adam)

    def _no_first_step(self, group: Settings, state: Mapping[str, object]) -> str | None:
        return "Adam with decoupled weight decay is AdamW: take that" if group["decoupled_weight_decay"] else None


def fits(candidate: object, wanted: Tensor) -> bool:
    """Is it a tensor that can stand in the other's place?"""
    if not isinstance(candidate, Tensor):
        return False
    one, other = ((t.shape, t.stride(), t.dtype, t.device) for t in (candidate, wanted))
    return one == other


def _aligned(gradient: Tensor, parameter: Tensor) -> Tensor:
    """The gradient in the parameter's memory layout, which eager's `.grad` has and the fused kernels assume."""
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)
