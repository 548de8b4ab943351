"""torch.optim's SGD and AdamW as operators over tensors that stay where they are."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from systems.base import Unsupported


class StaticOptimizer(ABC):
    """A torch.optim optimizer's step in a form that can be captured once and replayed.

    The state stays the optimizer's: `moments` are the very tensors of `optimizer.state`, or new ones that `refresh` puts
    there before the first step. The learning rates may change between steps; `refresh` sees to that too. On a CPU a step is
    the optimizer's own implementation, to the bit; on a GPU it is torch's fused one, which reads learning rate and step
    counter from the device.

    Raises Unsupported for other optimizers, and for settings with which an optimizer's step cannot be captured.
    """

    name: ClassVar[str]
    kind: ClassVar[type[torch.optim.Optimizer]]
    fixed: ClassVar[tuple[str, ...]]  # settings of a parameter group that a captured step holds on to

    @staticmethod
    def of(optimizer: torch.optim.Optimizer, parameters: Collection[Tensor]) -> StaticOptimizer:
        """parameters: those of the optimizer's that a step has gradients for; it leaves the others alone."""
        for kind in (StaticSGD, StaticAdamW):
            if type(optimizer) is kind.kind:
                return kind(optimizer, parameters)
        raise Unsupported(f"{type(optimizer).__name__} steps cannot be scheduled: SGD's and AdamW's can")

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Collection[Tensor]):
        self.optimizer = optimizer
        if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:  # type: ignore[attr-defined]
            raise Unsupported("the optimizer has step hooks, which a captured step would not run")
        wanted = {id(p) for p in parameters}
        self.groups = [[p for p in group["params"] if id(p) in wanted] for group in optimizer.param_groups]
        self.settings = [self._settings(group) for group in optimizer.param_groups]
        self.moments: dict[Tensor, dict[str, Tensor]] = {}
        self.rates: list[Tensor | None] = []  # by group: on a GPU, where a captured step finds its learning rate
        self.seen: list[Any] | None = None  # the optimizer's state as the last `refresh` left it
        self.set_rates: list[float | None] = [None] * len(self.groups)
        for group, chosen in zip(optimizer.param_groups, self.groups, strict=True):
            if group.get("differentiable"):
                raise Unsupported("a differentiable optimizer's step cannot be captured")
            if any(p.is_complex() for p in chosen):
                raise Unsupported("complex parameters are not supported")
            on_gpu = bool(chosen) and chosen[0].is_cuda
            self.rates.append(torch.zeros((), dtype=torch.float32, device=chosen[0].device) if on_gpu else None)
            for p in chosen:
                there = optimizer.state.get(p, {})
                if reason := self._no_first_step(group, there):
                    raise Unsupported(reason)
                initial = self._initial(group, p)
                self.moments[p] = {k: there[k] if fits(there.get(k), new) else new for k, new in initial.items()}

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
        """The operator: one step of `parameters`, all of one group, with `moments` as from `moments_of`."""
        settings = self.optimizer.param_groups[group]
        aligned = [_aligned(g, p) for g, p in zip(gradients, parameters, strict=True)]
        # foreach would differ from neither but in that it may write into the gradients.
        how = {"foreach": False, "fused": settings["fused"], "lr": settings["lr"]}
        if rate is not None:
            how |= {"fused": True, "lr": rate}
        self._update(settings, list(parameters), aligned, moments, how)

    def moments_of(self, parameters: Sequence[Tensor]) -> dict[str, list[Tensor]]:
        """By name, one tensor a parameter."""
        names = self.moments[parameters[0]]
        return {name: [self.moments[p][name] for p in parameters] for name in names}

    def refresh(self) -> None:
        """Before each step: take over learning rates, and moments that were loaded or written elsewhere since.

        Raises ValueError where a setting has changed that the step was captured with.
        """
        groups = self.optimizer.param_groups
        if len(groups) != len(self.groups):
            raise ValueError(f"the step was prepared for {len(self.groups)} parameter groups, now there are {len(groups)}")
        for i, group in enumerate(groups):
            if (now := self._settings(group)) != self.settings[i]:
                name = next(k for k in now if now[k] != self.settings[i][k])
                raise ValueError(
                    f"{name} of parameter group {i} has changed from {self.settings[i][name]} to {now[name]} since the step "
                    "was prepared: prepare it again"
                )
            self._set_rate(i, group["lr"])
        entries = self._entries()
        if self.seen is not None and len(entries) == len(self.seen) and all(map(operator.is_, entries, self.seen)):
            return  # compared as a whole, since this comes before each step
        for group, chosen in zip(groups, self.groups, strict=True):
            for p in chosen:
                if mine := self.moments[p]:
                    self._take_over(group, mine, self.optimizer.state[p])
        self.seen = self._entries()

    def _entries(self) -> list[Any]:
        """All that the optimizer's state holds, parameters and moments."""
        return [x for p, moments in self.optimizer.state.items() for x in (p, *moments.values())]

    def _take_over(self, group: dict[str, Any], mine: dict[str, Tensor], theirs: dict[str, Any]) -> None:
        for name, moment in mine.items():
            there = theirs.get(name)
            if there is moment:
                continue
            if there is not None:
                moment.copy_(there)
            elif reason := self._no_first_step(group, theirs):
                raise ValueError(reason)
            else:
                moment.zero_()
            theirs[name] = moment

    def _set_rate(self, group: int, rate: float | Tensor) -> None:
        held = self.rates[group]
        if held is None:
            return
        if isinstance(rate, Tensor):
            held.copy_(rate, non_blocking=True)
        elif rate != self.set_rates[group]:
            held.fill_(rate)
            self.set_rates[group] = rate

    def _settings(self, group: dict[str, Any]) -> dict[str, Any]:
        settings = {name: group[name] for name in self.fixed}
        if any(isinstance(x, Tensor) for x in (*settings.values(), *settings.get("betas", ()))):
            raise Unsupported("settings of the optimizer given as tensors are not supported, but for the learning rate")
        return settings

    @abstractmethod
    def _initial(self, group: dict[str, Any], parameter: Tensor) -> dict[str, Tensor]:
        """The moments of a parameter before its first step."""

    def _no_first_step(self, group: dict[str, Any], there: dict[str, Any]) -> str | None:
        """Why a parameter whose state is `there` cannot begin with a step like all others, or None."""
        return None

    @abstractmethod
    def _update(
        self,
        group: dict[str, Any],
        parameters: list[Tensor],
        gradients: list[Tensor],
        moments: dict[str, list[Tensor]],
        how: dict[str, Any],
    ) -> None: ...


class StaticSGD(StaticOptimizer):
    name = "SGD"
    kind = torch.optim.SGD
    fixed = ("momentum", "dampening", "weight_decay", "nesterov", "maximize", "fused")

    def _initial(self, group: dict[str, Any], parameter: Tensor) -> dict[str, Tensor]:
        # Zeros make the first step's momentum the gradient, as in torch.optim.
        return {"momentum_buffer": torch.zeros_like(parameter)} if group["momentum"] else {}

    def _no_first_step(self, group: dict[str, Any], there: dict[str, Any]) -> str | None:
        if group["momentum"] and group["dampening"] and there.get("momentum_buffer") is None:
            return "with dampening SGD's first step differs from all others: take it in eager mode"
        return None

    def _update(
        self,
        group: dict[str, Any],
        parameters: list[Tensor],
        gradients: list[Tensor],
        moments: dict[str, list[Tensor]],
        how: dict[str, Any],
    ) -> None:
        settings = {k: group[k] for k in ("weight_decay", "momentum", "dampening", "nesterov", "maximize")}
        buffers: list[Tensor | None] = [*moments.get("momentum_buffer", [None] * len(parameters))]
        sgd(parameters, gradients, buffers, **settings, **how)


class StaticAdamW(StaticOptimizer):
    name = "AdamW"
    kind = torch.optim.AdamW
    fixed = ("betas", "eps", "weight_decay", "amsgrad", "maximize", "fused", "capturable")

    def _initial(self, group: dict[str, Any], parameter: Tensor) -> dict[str, Tensor]:
        names = ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else []))
        # The counter is on the device, as with capturable=True, since a captured step cannot wait for the host.
        step = torch.zeros((), dtype=torch.float32, device=parameter.device)
        return {"step": step, **{name: torch.zeros_like(parameter) for name in names}}

    def _update(
        self,
        group: dict[str, Any],
        parameters: list[Tensor],
        gradients: list[Tensor],
        moments: dict[str, list[Tensor]],
        how: dict[str, Any],
    ) -> None:
        beta1, beta2 = group["betas"]
        settings = {k: group[k] for k in ("amsgrad", "weight_decay", "eps", "maximize")}
        first, second, largest = (moments.get(k, []) for k in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"))
        adamw(
            parameters,
            gradients,
            first,
            second,
            largest,
            moments["step"],
            beta1=beta1,
            beta2=beta2,
            capturable=group["capturable"],
            **settings,
            **how,
        )


def fits(there: Any, wanted: Tensor) -> bool:
    """Is it a tensor that can stand in this one's place?"""
    if not isinstance(there, Tensor):
        return False
    mine, theirs = ((t.shape, t.stride(), t.dtype, t.device) for t in (wanted, there))
    return mine == theirs


def _aligned(gradient: Tensor, parameter: Tensor) -> Tensor:
    """The gradient in the parameter's memory layout, which the fused kernels take for granted and eager's `.grad` has."""
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)
