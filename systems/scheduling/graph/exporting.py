"""A module through torch.export: what it refuses, and what it would leave out, is Unsupported."""

import logging
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, fx, nn
from torch._ops import HigherOrderOperator
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves

from conf.own_code import with_own_frame, with_own_line
from conf.text import first_line
from systems.base import Unsupported
from systems.preparing import collector_off
from systems.training.restore import attributes_kept

from .examples import stand_ins

LOGGERS = ("torch.export", "torch.fx", "torch._subclasses")
ASSIGNED = re.compile(r"self\.([\w.]+)(?=[^\n]* assigned during export)")  # the names in torch.export's own warning


def export(module: nn.Module, inputs: tuple[Tensor, ...], is_functional: bool = False) -> ExportedProgram:
    """Export a module at the shapes of its inputs, with stand-ins for them.

    Args:
        is_functional: decompose what changes a tensor in place.

    Raises:
        Unsupported: torch.export refuses the module; an input is no dense tensor; the module reads a tensor that it then
            assigns anew, which is neither parameter nor buffer. The reason is one line.
    """
    own_inputs = stand_ins(inputs)
    check_module(module)
    try:
        # torch.export gives attributes back, but lists and dicts as others.
        with (
            collector_off(),
            quiet(),
            torch.no_grad(),
            attributes_kept(module) as changes,
            warnings.catch_warnings(record=True) as told,
        ):
            warnings.simplefilter("always")
            exported = torch.export.export(module, own_inputs, strict=False)
            exported = exported.run_decompositions({}) if is_functional else exported
    except Exception as error:  # export raises whatever the model's own Python does
        message = f"torch.export cannot capture it: {type(error).__name__}: {first_line(error)}"
        raise Unsupported(with_own_line(message, error)) from error
    assigned = {name for warning in told for name in ASSIGNED.findall(str(warning.message))}
    constants = memories(exported.constants.values())
    read = [name for name in sorted(assigned) if _is_constant(module, name, constants)]
    read += [name for name, then in changes.assigned.items() if not constants.isdisjoint(memories(then))]
    if name := next(iter(read), None):
        raise Unsupported(f"it changes its own state in a forward pass ({name}), which is no buffer")
    return exported


def unschedulable(node: fx.Node) -> Unsupported:
    """Why a node of a captured graph is no operator of a schedule, with the line of a person's own model that it is of."""
    by_data = "it chooses by its data what to run"  # the branches and the loops of torch.cond and of its like
    if node.op == "call_function" and not isinstance(node.target, HigherOrderOperator):
        by_data = "it computes a size or a number of Python's from its data"
    message = f"{by_data}, and a schedule has the same operators in each call"
    return Unsupported(with_own_frame(message, str(node.meta.get("stack_trace"))))


def check_module(module: object) -> None:
    """Raise Unsupported for what is no module."""
    if not isinstance(module, nn.Module):
        raise Unsupported(f"it is a {type(module).__name__}, and no module of PyTorch")


def _is_constant(module: nn.Module, name: str, constants: set[int]) -> bool:
    """Is a tensor of this attribute among a program's constants, or one of a list or dict there?"""
    owner, _, attribute = name.rpartition(".")
    return not memories(tree_leaves(getattr(module.get_submodule(owner), attribute, None))).isdisjoint(constants)


def memories(values: Iterable[object]) -> set[int]:
    return {value.untyped_storage()._cdata for value in values if isinstance(value, Tensor)}


@contextmanager
def quiet() -> Iterator[None]:
    """Silence PyTorch's loggers within: a trace logs its steps, and with tracebacks the errors that it raises."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
