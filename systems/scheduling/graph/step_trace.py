"""The trace of a step of training: forward, loss and backward, as autograd dispatches them below all decompositions."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from conf.text import first_line
from systems.base import Unsupported
from systems.preparing import collector_off
from systems.training.restore import attributes_kept, python_random_kept

from .effects import draws
from .examples import stand_ins
from .exporting import check_module, memories, quiet

aten = torch.ops.aten


@dataclass
class StepTrace:
    """A traced step.

    Args:
        graph: As make_fx leaves it. Its placeholders stand for `state`, then for the inputs.
        state: Parameters and buffers by name.
        constants: Holds the tensors that the graph's attributes name.
        loss: The node of the loss, [].
        gradients: By parameter, the node of its gradient, of the parameter's shape.
    """

    graph: fx.Graph
    state: dict[str, Tensor]
    constants: nn.Module
    loss: fx.Node
    gradients: dict[Tensor, fx.Node]


def trace_step(
    module: nn.Module,
    trained: Sequence[Tensor],
    loss: Callable[[Any, Tensor], Tensor],
    inputs: tuple[Tensor, ...],
    target: Tensor,
) -> StepTrace:
    """Trace `loss(module(*inputs), target)` and the gradients of `trained`, without running them.

    Raises:
        Unsupported: The step cannot be traced, or would do in a schedule something else than in eager execution.
    """
    check_module(module)
    *own_inputs, own_target = stand_ins((*inputs, target))
    state = dict(module.named_parameters()) | dict(module.named_buffers())
    names = {id(t): name for name, t in state.items()}
    if not trained:
        raise Unsupported("no parameter of the optimizer requires a gradient")
    if any(id(p) not in names for p in trained):
        raise Unsupported("the optimizer holds parameters that are not the module's")
    if any(p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None) for p in trained):
        raise Unsupported("a parameter has a hook on its gradient, which a captured step would not run")
    devices = {str(x.device) for x in (*state.values(), *inputs, target)}
    if len(devices) > 1:
        raise Unsupported(f"module, inputs and target are on several devices: {', '.join(sorted(devices))}")

    def step(tensors: list[Tensor], inputs: tuple[Tensor, ...], target: Tensor) -> tuple[Any, ...]:
        own = dict(zip(names, tensors, strict=True))
        storages = [storage_of(t) for t in tensors]
        with _in_place_of(own, module):  # of all of it: a loss may read parameters, and a checkpoint's backward does
            value = loss(module(*inputs), target)  # []
            if value.shape != ():
                raise ValueError(f"the loss has shape {list(value.shape)}, and must be a single number")
            gradients = torch.autograd.grad(value, [own[id(p)] for p in trained], allow_unused=True)
        for name, tensor, storage in zip(state, tensors, storages, strict=True):
            if storage_of(tensor) != storage:
                raise ValueError(f"forward assigns the .data of {name}: write it in place")
        return value, *gradients

    try:
        # In one thread, so that the trace has the order of eager's backward, whichever device the fake tensors are of.
        one_thread = torch.autograd.set_multithreading_enabled(False)
        with (
            collector_off(),
            quiet(),
            attributes_kept(module, loss) as changes,
            python_random_kept() as drawn,
            torch.enable_grad(),
            one_thread,
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            traced = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(
                [*state.values()], tuple(own_inputs), own_target
            )
    except Exception as error:  # tracing raises whatever the model's own Python does
        raise Unsupported(f"the step cannot be traced: {type(error).__name__}: {first_line(error)}") from error
    constants = memories((*vars(traced).values(), *traced.buffers(), *traced.parameters()))
    if name := next((name for name, then in changes.assigned.items() if not constants.isdisjoint(memories(then))), None):
        raise Unsupported(f"it changes its own state in a forward pass ({name}), which is no buffer")
    if changes.registered:
        raise Unsupported(
            f"it sets {changes.registered[0]} in a forward pass: call the module once before, or write it in place"
        )
    if drawn:
        raise Unsupported(f"it draws from {drawn[0]}'s random numbers, which a capture would fix: draw them by torch")
    if name := next((names[id(p)] for p in trained if storage_of(p) in constants), None):
        raise Unsupported(f"it reads {name} from before the step: read it from the module each time")
    value, *gradients = tree_leaves(next(n for n in traced.graph.nodes if n.op == "output").args[0])
    with_gradient = {p: g for p, g in zip(trained, gradients, strict=True) if g is not None}
    if not with_gradient:
        raise Unsupported("the loss depends on no parameter of the optimizer")
    trace = StepTrace(traced.graph, state, traced, value, with_gradient)
    _check(trace)
    return trace


@contextmanager
def _in_place_of(stand_ins: Mapping[int, Tensor], module: nn.Module) -> Iterator[None]:
    """Put tensors in the place of a module's. A buffer that is assigned within writes its stand-in.

    Not torch.func.functional_call, which leaves them in a submodule that has two names.

    Args:
        stand_ins: By the identity of each parameter and buffer.
    """
    owners: list[dict[str, Any]] = [owner for part in module.modules() for owner in (part._parameters, part._buffers)]
    members = [
        (owner, k, value, stand_ins[id(value)]) for owner in owners for k, value in owner.items() if value is not None
    ]
    for owner, name, _, stand_in in members:
        owner[name] = stand_in
    try:
        yield
        with torch.no_grad():
            for owner, name, _, stand_in in members:
                if (assigned := owner.get(name)) is not None and assigned is not stand_in:
                    stand_in.copy_(assigned)
    finally:
        for owner, name, value, _ in members:
            owner[name] = value


def _check(trace: StepTrace) -> None:
    """Raise Unsupported for operators that do in a schedule something else than in eager execution."""
    nodes = list(trace.graph.nodes)
    if any(node.target is aten.mkldnn_rnn_layer.default for node in nodes):
        raise Unsupported(
            "oneDNN's LSTM keeps what its backward reads for autograd alone: prepare the step under "
            "torch.backends.mkldnn.flags(enabled=False)"
        )
    for node in nodes:
        values = [v for v in tree_leaves(node.meta.get("val")) if isinstance(v, Tensor)]
        if any(v.layout is not torch.strided for v in values):
            raise Unsupported(
                f"{node.name} gives a sparse tensor, as of sparse gradients, and only dense ones are scheduled"
            )
    backward = [node for node in nodes[nodes.index(trace.loss) :] if isinstance(node.target, OpOverload)]
    drawing = [node for node in backward if draws(node.target, node.args, node.kwargs)]
    if any(not node.target._schema.name.endswith("_backward") for node in drawing):  # attention's own has what forward drew
        raise Unsupported("its backward, as of a checkpoint, would draw other random numbers than its forward")


def storage_of(tensor: Tensor) -> int:
    """The number of its storage, alike for tensors that share memory."""
    return tensor.untyped_storage()._cdata
