"""What PyTorch makes anew in each export, kept for a process: most of an export's time, where a model is small."""

import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import cache
from typing import Any

import torch
from torch._subclasses import fake_impls
from torch.export import decomp_utils, exported_program

# Functions of PyTorch's own, which another release may not have.
FIND_COMPOSITES, OVERRIDE_COMPOSITES = "_collect_all_valid_cia_ops", "_override_composite_implicit_decomp"
find_composites = getattr(exported_program, FIND_COMPOSITES, None)
override_composites = getattr(exported_program, OVERRIDE_COMPOSITES, None)

Kernels = dict[Any, Callable[..., Any]]  # by dispatch key
overrides: dict[Any, tuple[Any, Kernels, Kernels, Any]] = {}  # by operator: decomposition, kernels before, within, fake rule


def keep_what_exports_make() -> None:
    """The composite operators, which change with registrations alone, and the kernels that take their place in an export."""
    if find_composites is not None:
        for module in (exported_program, decomp_utils):
            setattr(module, FIND_COMPOSITES, composites_so_far)
    if override_composites is not None:
        setattr(exported_program, OVERRIDE_COMPOSITES, overridden)
    torch._ops.Callable = typing.Callable  # which makes a type once


@cache
def composites(num_registered: int, namespaces: tuple[str, ...]) -> set[Any]:
    assert find_composites is not None
    operators: set[Any] = find_composites()
    return operators


def composites_so_far() -> set[Any]:
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
    return composites(len(registered), tuple(torch.ops._dir))


@contextmanager
def overridden(decompositions: dict[Any, Callable[..., Any]]) -> Iterator[None]:
    """As PyTorch's own, which makes some twenty kernels for each operator; they stand until it has others of its own."""
    assert override_composites is not None
    fake_rules = fake_impls.op_implementations_dict
    before = {operator: dict(operator.py_kernels) for operator in decompositions}
    with_own_rule = decompositions.keys() & fake_rules.keys()  # which PyTorch leaves to them in this export alone
    new = {
        operator: decomposition
        for operator, decomposition in decompositions.items()
        if operator in with_own_rule or overrides.get(operator, ())[:2] != (decomposition, before[operator])
    }
    with override_composites(new):
        for operator, decomposition in new.items():
            key = None if operator in with_own_rule else decomposition
            overrides[operator] = key, before[operator], dict(operator.py_kernels), fake_rules[operator]
    try:
        for operator in decompositions:
            _, _, within, fake_rule = overrides[operator]
            set_kernels(operator, within)
            fake_impls.register_op_impl(operator)(fake_rule)
        yield
    finally:
        for operator, kernels in before.items():
            set_kernels(operator, kernels)
            fake_impls._deregister_op_impl(operator)


def set_kernels(operator: Any, kernels: Kernels) -> None:
    operator.py_kernels.clear()
    operator.py_kernels.update(kernels)
    operator._dispatch_cache.clear()


def keep_onnx_functions() -> None:
    """Each export to ONNX makes the exporter's functions of all operators anew."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    made = cache(ONNXRegistry.from_torchlib)

    def from_torchlib(*opset_version: int, **named: int) -> ONNXRegistry:
        registry = copy(made(*opset_version, **named))
        registry.functions = {operator: [*functions] for operator, functions in registry.functions.items()}
        return registry

    ONNXRegistry.from_torchlib = staticmethod(from_torchlib)
