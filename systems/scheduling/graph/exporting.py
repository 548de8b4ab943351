"""A module through torch.export: what it refuses, and what it would leave out, is Unsupported."""

import io
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr

import torch
from torch import Tensor, fx, nn
from torch._ops import HigherOrderOperator, OpOverload
from torch.export import ExportedProgram, exported_program
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._pytree import tree_leaves

from conf.own_code import with_own_frame, with_own_line
from conf.text import first_line
from systems.base import Unsupported
from systems.preparing import collector_off, one_at_a_time
from systems.training.restore import attributes_kept, held_tensors, held_values_kept, python_random_kept

from .effects import written
from .examples import stand_ins
from .fast_attention import fast_attention
from .repetition import repeats_itself

LOGGERS = ("torch.export", "torch.fx", "torch._subclasses")
aten = torch.ops.aten
SHUFFLE = aten.channel_shuffle.default
UNTRACKED = (aten.unsafe_chunk.default, aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default)
UNKNOWN = re.compile(r"Found <class '([\w.]+)'> in output, which is not a known type")  # in torch.export's own error
BY_DATA = "it chooses by its data what to run"
CHOOSING = ("cond", "while_loop")  # operators that run others by their data
ASSIGNED = re.compile(r"self\.([\w.]+)(?=[^\n]* assigned during export)")  # the names in torch.export's own warning


def export(module: nn.Module, inputs: tuple[Tensor, ...], is_functional: bool = False) -> ExportedProgram:
    """Export a module at the shapes of its inputs, with stand-ins for them.

    Args:
        is_functional: decompose what changes a tensor in place.

    Raises:
        Unsupported: torch.export refuses the module; an input is no dense tensor; the module reads a tensor that it then
            assigns anew, which is neither parameter nor buffer; it answers a second call in another way, by what it keeps;
            it changes a tensor in a way that cannot be decomposed. The reason is one line.
    """
    own_inputs = stand_ins(inputs)
    check_module(module)
    exported: ExportedProgram | None = None
    try:
        # torch.export gives attributes back, but lists and dicts as others.
        with (
            collector_off(),
            quiet(),
            _without_partial_graph(),
            torch.no_grad(),
            fast_attention(module),
            attributes_kept(module) as changes,
            _looked_at(module, changes.look),
            held_values_kept(module),
            python_random_kept() as drawn,
            warnings.catch_warnings(record=True) as told,
        ):
            warnings.simplefilter("always")
            exported = torch.export.export(module, own_inputs, strict=False)
            exported = _functional(exported) if is_functional else exported
    except Unsupported:
        raise
    except Exception as error:  # export raises whatever the model's own Python does
        if exported is not None and (changed := _written_constant(module, exported)):
            raise Unsupported(f"it changes its own state in a forward pass ({changed}), which is no buffer") from error
        raise Unsupported(with_own_line(f"torch.export cannot capture it: {_reason(error)}", error)) from error
    assigned = {name for warning in told for name in ASSIGNED.findall(str(warning.message))}
    if drawn:
        told_of = f"the model draws from {drawn[0]}'s random numbers: those of its capture are used in each call"
        warnings.warn(f"{told_of}, so draw them by torch where they matter", stacklevel=2)
    constants = memories(exported.constants.values())
    read = [name for name in sorted(assigned) if _is_constant(module, name, constants)]
    read += [name for name, then in changes.assigned.items() if not constants.isdisjoint(memories(then))]
    if name := next(iter(read), None):
        raise Unsupported(f"it changes its own state in a forward pass ({name}), which is no buffer")
    if changes.begun:
        with one_at_a_time:  # another thread may trace the module, which then computes with stand-ins
            is_repeated = repeats_itself(module, inputs)
        if not is_repeated:
            raise Unsupported(f"its answer depends on the calls before, by {changes.begun[0]}, which is no buffer")
    return exported


@contextmanager
def _looked_at(module: nn.Module, look: Callable[[], None]) -> Iterator[None]:
    """Look at the module once it has been traced: torch.export gives its attributes back, and says so of tensors alone."""
    hook = module.register_forward_hook(lambda *_: look())
    try:
        yield
    finally:
        hook.remove()


def _functional(exported: ExportedProgram) -> ExportedProgram:
    """Decompose what changes a tensor in place: whoever sees that tensor reads what comes out of the change.

    A view that its schema does not tell of, as einsum has, would see nothing: it is decomposed as well. Those of UNTRACKED
    are not, and a program that has one and changes a tensor is Unsupported.
    """
    changes = [node for node in exported.graph.nodes if _calls(node) and node.target._schema.is_mutable]
    for node in (node for node in changes if torch.Tag.inplace_view not in node.target.tags):
        values = [argument.meta["val"] for argument in tree_leaves(written(node.target, node.args, node.kwargs))]
        if any(map(_is_overlapping, values)):
            raise Unsupported(f"{node.target} changes a tensor of which several elements lie in one place, as expand makes")
    views = _unsaid_views(exported.graph)
    if changes and (unseen := views.intersection(UNTRACKED)):
        raise Unsupported(f"it changes a tensor, and {min(map(str, unseen))} may see it")
    table = torch.export.default_decompositions() if views else {}
    with _copies_kept():
        return exported.run_decompositions({view: table[view] for view in views if view in table})


@contextmanager
def _copies_kept() -> Iterator[None]:
    """Have torch.export keep what copies a new value to a buffer; else readers take the value, of any dtype and shape."""
    name = "_remove_unnecessary_copy_op_pass"
    remove = getattr(exported_program, name)
    setattr(exported_program, name, lambda module, signature: (module, signature))
    try:
        yield
    finally:
        setattr(exported_program, name, remove)


def _calls(node: fx.Node) -> bool:
    return node.op == "call_function" and isinstance(node.target, OpOverload)


def _unsaid_views(graph: fx.Graph) -> set[OpOverload]:
    """Operators with an output in the memory of an argument, though their schemas do not say so."""
    views = set[OpOverload]()
    for node in filter(_calls, graph.nodes):
        schema = node.target._schema  # type: ignore[union-attr]
        if node.target is SHUFFLE:
            if _moves_nothing(*node.args):
                views.add(SHUFFLE)
        elif not schema.is_mutable and not any(r.alias_info for r in schema.returns):
            read = [value for argument in node.all_input_nodes for value in _known(argument)]
            if not memories(read).isdisjoint(memories(_known(node))):
                views.add(node.target)  # type: ignore[arg-type]
    return views


def _moves_nothing(shuffled: fx.Node, groups: int) -> bool:
    """Does channel_shuffle return memory of its argument, as on a GPU? PyTorch's kernel for a CPU always copies.

    Stand-ins do not tell: they share memory on a CPU too, and only the first of equal calls does.
    """
    x = shuffled.meta["val"]
    return x.device.type != "cpu" and groups in (1, x.shape[1]) and x.is_contiguous()


def _known(node: fx.Node) -> list[Tensor]:
    """The stand-ins of what a node returns, without those of a vmap, of which nothing says where they lie."""
    values = [value for value in tree_leaves(node.meta.get("val")) if isinstance(value, Tensor)]
    return [value for value in values if not torch._C._functorch.is_batchedtensor(value)]


def _is_overlapping(x: Tensor) -> bool:
    """May two of its elements lie in one place?"""
    last = 0
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1):
        if stride <= last:
            return x.numel() > 0
        last += (size - 1) * stride
    return False


def unschedulable(node: fx.Node) -> Unsupported:
    """Why a node of a captured graph is no operator of a schedule, with the line of a person's own model that it is of."""
    holder = next(iter(node.users), node) if node.op == "get_attr" else node  # of which it is a branch, or a function
    message = "it computes a size or a number of Python's from its data, and a schedule has the same operators in each call"
    if isinstance(holder.target, HigherOrderOperator):
        name = holder.target.name()
        message = f"it runs {name}, which holds operators of its own, and a schedule has single ones"
        if name in CHOOSING:
            message = f"{BY_DATA}, and a schedule has the same operators in each call"
        elif name.startswith("auto_functionalized"):
            message = f"{holder.args[0]} changes its argument"
    return Unsupported(with_own_frame(message, str(node.meta.get("stack_trace"))))


def check_module(module: object) -> None:
    """Raise Unsupported for what is no module."""
    if not isinstance(module, nn.Module):
        raise Unsupported(f"it is a {type(module).__name__}, and no module of PyTorch")


def _reason(error: Exception) -> str:
    """Why torch.export has refused a module, in words of what the module does where they are known."""
    told = f"{type(error).__name__}: {first_line(error)}"
    if isinstance(error, GuardOnDataDependentSymNode):
        return f"{BY_DATA}: {told}"
    if (unknown := UNKNOWN.search(str(error))) is None:
        return told
    kind = unknown[1]
    hint = "set use_cache = False in its config" if kind.startswith("transformers.cache_utils.") else "return tensors"
    return f"its output holds a {kind.rpartition('.')[2]}, which it knows no parts of: {hint}"


def _written_constant(module: nn.Module, exported: ExportedProgram) -> str | None:
    """Where a module holds a tensor, neither parameter nor buffer, that the program writes in place; None for nowhere."""
    signature = exported.graph_signature
    constants = signature.inputs_to_lifted_tensor_constants
    for node in exported.graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
            continue
        for argument, value in zip(node.target._schema.arguments, node.args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write and getattr(value, "name", "") in constants:
                name = constants[value.name]
                written = memories([exported.constants[name]])
                places = ((place, x) for place, tensors in held_tensors(module) for x in tensors)
                return next((place for place, x in places if not written.isdisjoint(memories([x]))), name)
    return None


def _is_constant(module: nn.Module, name: str, constants: set[int]) -> bool:
    """Is a tensor of this attribute among a program's constants, or one of a list or dict there?"""
    owner, _, attribute = name.rpartition(".")
    return not memories(tree_leaves(getattr(module.get_submodule(owner), attribute, None))).isdisjoint(constants)


def memories(values: Iterable[object]) -> set[int]:
    return {value.untyped_storage()._cdata for value in values if isinstance(value, Tensor)}


@contextmanager
def _without_partial_graph() -> Iterator[None]:
    """Leave out what torch.export prints of a graph that it has not finished: thousands of lines for a large model."""
    told, graph = io.StringIO(), "\0"
    try:
        with redirect_stderr(told):
            yield
    except Exception as error:
        graph = f"{getattr(error, 'partial_fx_graph', '')}\n"
        raise
    finally:
        if sys.stderr is not None:
            sys.stderr.write(told.getvalue().replace(graph, ""))


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
