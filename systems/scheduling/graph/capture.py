"""Turns a module into its operators, through torch.export."""

import operator
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._prims_common import is_non_overlapping_and_dense_or_false, suggest_memory_format
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from systems.base import Unsupported
from systems.preparing import as_captured

from .effects import READERS_AT_AN_OFFSET, DrawAfter, draws, is_view
from .exporting import export, unschedulable
from .operator_graph import Operator, OperatorGraph
from .partial_writes import with_partial_writes
from .patterns import GROUPED, VIEW
from .program import Call, Input, Output, Program
from .write_back import write_back

# Operators that compute nothing: export leaves these checks behind, of shapes and values that capture has fixed.
ASSERTIONS = ("aten._assert", "aten._assert_async", "aten._assert_scalar", "aten._assert_tensor_metadata")
TRACED_EXPERTS = "transformers::grouped_mm_fallback"
GROUPED_CAPABILITY = (8, 0)  # compute capability from which PyTorch has grouped products


def capture(module: nn.Module, inputs: tuple[Tensor, ...]) -> Program:
    """Capture `module` (in eval form) at the shapes of `inputs` as a Program.

    On a GPU the program runs once, which shows how its tensors lie in memory.

    Invariant: mutation is functionalised away, so every dependency is a data dependency (RAW), and there is no WAR or WAW.
    Writes into parts of a tensor, one after the other, are one operator, as `with_partial_writes` says.
    Buffers that the module writes are written back as `write_back` says. Of operators that draw random numbers, each has an
    output of the one before for an argument.

    Args:
        inputs: Dense tensors, in any memory. The program takes each for an input of its own, also where two are one tensor.

    Raises:
        Unsupported: as `export` does, or the module changes its inputs. The reason is one line.
    """
    program = from_exported(export(module, inputs, is_functional=True), module, inputs)
    return _observed(program) if program.device.type == "cuda" else program


def from_exported(exported: ExportedProgram, module: nn.Module, inputs: tuple[Tensor, ...]) -> Program:
    """Turn an exported program into a Program over the module's own parameters and buffers."""
    names = _written_buffers(exported)
    program = from_graph(exported.graph, _placeholders(exported, module), exported.call_spec.out_spec, inputs)
    return write_back(program, [module.get_buffer(name) for name in names]) if names else with_partial_writes(program)


def from_graph(graph: fx.Graph, references: list[Any], output_spec: Any, inputs: tuple[Tensor, ...]) -> Program:
    """Turn a functional fx graph of aten operators into a Program.

    Invariant: `environment[node]` is what stands for the node in the arguments of later operators.

    Args:
        references: For each placeholder in order, what stands for it: an Input, a tensor or a constant.
        output_spec: The structure of the module's outputs.
    """
    operators: list[Operator] = []
    predecessors: list[list[int]] = []
    calls: list[Call] = []
    environment: dict[fx.Node, Any] = {}
    placeholders = iter(references)
    outputs: list[Any] = []
    returned, unneeded = _seen_through(graph.output_node().all_input_nodes), _unneeded_copies(graph)
    drawn: list[Output] = []  # of the operator that drew last
    is_moved = False  # whether a norm's output lies otherwise than export has it, and with it what follows
    for node in graph.nodes:
        if node.op == "placeholder":
            environment[node] = next(placeholders)
        elif node.op == "output":
            outputs = [environment[a] if isinstance(a, fx.Node) else a for a in node.args[0]]
        elif node.op != "call_function":
            raise unschedulable(node)
        elif node.target is operator.getitem:
            source = environment[node.args[0]]
            environment[node] = source[node.args[1]] if isinstance(source, tuple) else Output(source.operator, node.args[1])
        elif not isinstance(node.target, torch._ops.OpOverload):
            raise unschedulable(node)
        elif str(node.target.overloadpacket) in ASSERTIONS and not node.users:
            continue
        elif _is_dropout(node) or (
            _is_copy(node)
            and node not in returned
            and (isinstance(environment[node.args[0]], Output) or _is_of_the_code(node.args[0]))
        ):
            environment[node] = environment[node.args[0]]
        elif node in unneeded:
            environment[node] = environment[node.args[1]]
        elif node.target._schema.is_mutable:
            raise Unsupported(f"{node.target} changes its argument")
        else:
            v = len(operators)
            target, args, kwargs = _as_executed(node)
            is_norm = target is torch.ops.aten.batch_norm.default is not node.target
            is_moved = is_moved or _is_moved(node)
            if is_moved and target is VIEW:
                target = torch.ops.aten.reshape.default  # export's reshape, which copies where a view is none
            operators.append(Operator(v, target._schema.name.split("::")[1], str(target)))
            produces = on_meta(node.meta.get("val"))
            # batch_norm returns one tensor, and the operator that it replaces three, of which only the first is read.
            environment[node] = (Output(v),) if is_norm else Output(v)
            own_args, own_kwargs = fx.map_arg((args, dict(kwargs)), environment.__getitem__)
            function: Any = target
            if draws(target, args, kwargs):
                if drawn:
                    function, own_args = DrawAfter(target), (*drawn, *own_args)
                drawn = [Output(v, 0 if isinstance(produces, list | tuple) else None)]
            calls.append(Call(function, own_args, own_kwargs, produces[0] if is_norm else produces))
            predecessors.append([o.operator for o in calls[v].references()])
    return Program(OperatorGraph(operators, predecessors), calls, outputs, output_spec, inputs)


def _observed(program: Program) -> Program:
    """The program with the strides that its operators return when they run.

    Export assumes that cuDNN's convolutions always return contiguous tensors.
    """
    produced: dict[int, Any] = {}

    def note(operator: int, output: Any) -> None:
        produced[operator] = on_meta(output)

    with torch.random.fork_rng(devices=[program.device]), program.undone(), as_captured(program.device.type):
        program.run(program.examples, note)
    calls = [replace(call, produces=produced[v]) for v, call in enumerate(program.calls)]
    return Program(program.graph, calls, program.outputs, program.output_spec, program.examples, program.derived)


def _written_buffers(exported: ExportedProgram) -> list[str]:
    """The names of the buffers whose new values are the first outputs of the graph, in order."""
    names: list[str] = []
    for spec in exported.graph_signature.output_specs:
        if spec.kind == OutputKind.USER_INPUT_MUTATION:
            raise Unsupported(f"it changes its input {spec.target} in place")
        if spec.kind == OutputKind.BUFFER_MUTATION:
            names.append(str(spec.target))
        elif spec.kind != OutputKind.USER_OUTPUT:
            raise Unsupported(f"it changes its own state in a forward pass ({spec.target})")
    return names


def _placeholders(exported: ExportedProgram, module: nn.Module) -> list[Any]:
    references: list[Any] = []
    user_inputs = 0
    for spec in exported.graph_signature.input_specs:
        if spec.kind == InputKind.USER_INPUT:
            references.append(Input(user_inputs))
            user_inputs += 1
        elif spec.kind == InputKind.PARAMETER:
            references.append(module.get_parameter(spec.target))
        elif spec.kind == InputKind.BUFFER:
            references.append(module.get_buffer(spec.target))
        elif spec.kind == InputKind.CONSTANT_TENSOR:
            references.append(exported.constants[spec.target])
        else:
            raise Unsupported(f"it takes {spec.target}, a {spec.kind.name.lower()}")
    return references


def _as_executed(node: fx.Node) -> tuple[torch._ops.OpOverload, tuple[Any, ...], Mapping[str, Any]]:
    """The operator that eager execution dispatches in the place of a decomposed one.

    Export replaces batch_norm by its native kernel. In eager execution batch_norm chooses, and cuDNN's is faster on some
    shapes. Export of torch 2.11 copies a number of the host to a part of a GPU's tensor, where eager execution fills the
    part. No CUDA Graph holds such a copy. A trace takes a function of transformers' own for a layer of experts that is not
    of bfloat16, where eager execution takes PyTorch's.
    """
    if node.target is torch.ops.aten._native_batch_norm_legit_no_training.default and _only_first_output(node):
        x, weight, bias, mean, variance, momentum, epsilon = node.args
        args = (x, weight, bias, mean, variance, False, momentum, epsilon, torch.backends.cudnn.enabled)
        return torch.ops.aten.batch_norm.default, args, {}
    if node.target is torch.ops.aten.copy.default and _is_number_of_host(node):
        return torch.ops.aten.fill.Tensor, node.args[:2], {}
    if node.target._schema.name == TRACED_EXPERTS and _has_grouped_products(node):  # type: ignore[union-attr]
        return GROUPED, (*node.args, *node.kwargs.values()), {}
    return node.target, node.args, dict(node.kwargs)  # type: ignore[return-value]


def _has_grouped_products(experts: fx.Node) -> bool:
    """Has PyTorch grouped products for where these experts are?"""
    device = experts.args[1].meta["val"].device  # type: ignore[union-attr]
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= GROUPED_CAPABILITY


def _is_number_of_host(copy: fx.Node) -> bool:
    """Does this copy take one number from the host to a tensor of a GPU?"""
    to, of = (argument.meta["val"] for argument in copy.args[:2])  # type: ignore[union-attr]
    return of.dim() == 0 and of.device.type == "cpu" and to.device.type != "cpu"


def _is_moved(node: fx.Node) -> bool:
    """Is it a batch norm whose output lies in the order of its dimensions, and in export's words as its input does?"""
    if not str(node.target).startswith("aten._native_batch_norm_legit"):
        return False
    x = node.args[0].meta["val"]  # type: ignore[union-attr]
    return not x.is_contiguous(memory_format=suggest_memory_format(x))


def _seen_through(outputs: Iterable[Any]) -> set[fx.Node]:
    """The nodes in whose memory an output of the module lies: the outputs, and what they are views of.

    The caller may write there, or in what such a copy was made of.
    """
    nodes: set[fx.Node] = set()
    pending = [output for output in outputs if isinstance(output, fx.Node)]
    while pending:
        node = pending.pop()
        nodes.add(node)
        if node.target is operator.getitem or is_view(node.target):
            pending += node.all_input_nodes
    return nodes


def _unneeded_copies(graph: fx.Graph) -> set[fx.Node]:
    """The copies of new values to buffers that lie as those do. What reads the buffer later can read the value itself.

    A caller cannot: it may write to an output that is the buffer, and to the value.
    """
    outputs: list[Any] = list(graph.output_node().args[0])  # type: ignore[arg-type]
    copies = [node for node in dict.fromkeys(outputs) if getattr(node, "target", None) is torch.ops.aten.copy.default]
    for node in copies:
        outputs.remove(node)  # it is there once as a new value, and again where the module returns it
    shown = _seen_through(outputs)
    values = {node: [argument.meta["val"] for argument in node.args[:2]] for node in copies if node not in shown}
    return {node for node, (buffer, value) in values.items() if _lies_as(buffer, value)}


def _lies_as(x: Tensor, y: Tensor) -> bool:
    return (x.device, x.dtype, x.shape, x.stride()) == (y.device, y.dtype, y.shape, y.stride())


def _is_copy(node: fx.Node) -> bool:
    """Is it a copy of a dense tensor? Nothing is written in place, so a copy that is not returned is not needed.

    Export leaves one for a dropout, where eager execution returns its input.
    """
    if node.target is not torch.ops.aten.clone.default or node.kwargs.get("memory_format", torch.preserve_format) not in (
        None,
        torch.preserve_format,
    ):
        return False
    is_dense = is_non_overlapping_and_dense_or_false(node.args[0].meta["val"])  # type: ignore[union-attr]
    return is_dense and not _is_read_at_an_offset(node)


def _is_of_the_code(node: Any) -> bool:
    """Is it a tensor that export has made of numbers in the model's code? torch 2.11 copies it before each use."""
    return node.op == "placeholder" and "lifted_tensor" in node.name


def _is_dropout(node: fx.Node) -> bool:
    """Is it the copy that torch 2.11 has for a dropout? In eager execution that returns its input."""
    return node.target is torch.ops.aten.clone.default and "dropout" in node.meta.get("torch_fn", ("", ""))[1]


def _is_read_at_an_offset(node: fx.Node) -> bool:
    """Is the memory of this tensor, or of a view of it, read from a place that is counted from where the memory begins?"""
    return any(
        user.target in READERS_AT_AN_OFFSET or (is_view(user.target) and _is_read_at_an_offset(user)) for user in node.users
    )


def _only_first_output(node: fx.Node) -> bool:
    return all(user.target is operator.getitem and user.args[1] == 0 for user in node.users)


def on_meta(value: Any) -> Any:
    """The same structure with tensors on the meta device in the place of (fake) tensors."""
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return type(value)([on_meta(v) for v in value]) if isinstance(value, (list, tuple)) else value
