"""Some operators of a program as a program of their own over random inputs, to measure them alone."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils._pytree import tree_structure

from systems.base import Unsupported

from .operator_graph import Operator, OperatorGraph
from .patterns import GROUPED
from .program import Call, Input, Output, Program

Examples = dict[Any, list[Tensor]]
aten = torch.ops.aten
# Their memory holds anything until another operator writes it. In a part that may write less of it, since its inputs are
# zeros: what remains is no index, for one.
UNINITIALIZED = (
    *(aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default, aten.empty_permuted.default),
    *(aten.new_empty.default, aten.new_empty_strided.default),
)


@runtime_checkable
class MayGroup(Protocol):
    """A function that may compute by groups of rows."""

    @property
    def is_grouped(self) -> bool:
        """Does its third argument say where groups of the rows of its first one end?"""


def part(
    program: Program,
    operators: Sequence[int],
    channels_last: bool = False,
    examples_of: Examples | None = None,
    device: torch.device | None = None,
) -> Program:
    """Some operators of `program`, with inputs in the place of all they read from the rest of it.

    The part's outputs are those that the rest of the program reads. Floating-point inputs are random, others are zero, but
    for the ends of groups of rows, which are equally long; all have the strides that the program knows. Memory that an
    operator leaves uninitialized is an input too.

    Invariant: within one part no two inputs share memory.

    Args:
        operators: Ids, in the order of capture.
        channels_last: Inputs of four dimensions have that layout instead.
        examples_of: Inputs of other parts of the program, which this part uses again and adds to. A search makes thousands
            of parts, with few shapes among them.
        device: Of the inputs, if it is not the program's: meta, to ask for what is known of such a part.

    Raises:
        Unsupported: The part reads a number from the rest of the program, as `.item()` computes.
    """
    place = {v: i for i, v in enumerate(operators)}
    examples: list[Tensor] = []
    inputs: dict[Any, Input] = {}

    examples_by_shape: Examples = {} if examples_of is None else examples_of
    num_used: dict[Any, int] = {}

    def example_of(value: Any) -> Tensor:
        made = example(value, device or program.device)
        is_image = channels_last and made.dim() == 4
        return made.contiguous(memory_format=torch.channels_last) if is_image else made

    def shared(value: Any) -> Tensor:
        shape = (tuple(value.shape), value.stride(), value.dtype) if isinstance(value, Tensor) else None
        same, nth = examples_by_shape.setdefault(shape, []), num_used.get(shape, 0)
        if nth == len(same):
            same.append(example_of(value))
        num_used[shape] = nth + 1
        return same[nth]

    def is_inside(v: int) -> bool:
        return v in place and program.calls[v].function not in UNINITIALIZED

    def inside(argument: Any) -> Any:
        if isinstance(argument, Output) and is_inside(argument.operator):
            return Output(place[argument.operator], argument.index)
        if not isinstance(argument, Output | Input):
            return argument
        if argument not in inputs:
            inputs[argument] = Input(len(examples))
            examples.append(shared(program.value(argument)))
        return inputs[argument]

    calls = [program.calls[v].map(inside) for v in operators]
    spread_groups(calls, examples)
    graph = OperatorGraph(
        [Operator(i, program.graph.operators[v].name, program.graph.operators[v].target) for i, v in enumerate(operators)],
        [[place[u] for u in program.graph.predecessors[v] if is_inside(u)] for v in operators],
    )
    final = program.kept_operators()
    outputs = [Output(place[v]) for v in operators if v in final or any(r not in place for r in program.graph.successors[v])]
    return Program(graph, calls, outputs, tree_structure([0] * len(outputs)), tuple(examples))


def spread_groups(calls: Sequence[Call], examples: list[Tensor]) -> None:
    """Make inputs that say where groups of rows end those of groups that are equally long: empty ones would cost nothing."""

    def num_dimensions(argument: Any) -> int:
        value = calls[argument.operator].produces if isinstance(argument, Output) else argument
        value = examples[value.index] if isinstance(value, Input) else value
        return value.dim() if isinstance(value, Tensor) else 0

    for call in calls:
        is_grouped = call.function is GROUPED or (isinstance(call.function, MayGroup) and call.function.is_grouped)
        if not is_grouped or len(call.args) < 3 or list(map(num_dimensions, call.args[:2])) != [2, 3]:
            continue
        if isinstance(ends := call.args[2], Input):
            like = examples[ends.index]
            numbers = torch.arange(1, len(like) + 1, dtype=torch.int64, device=like.device)
            examples[ends.index] = (numbers * call.produces.shape[0] // len(like)).to(like.dtype)


def alone(name: str, target: str, call: Call, examples: Sequence[Tensor]) -> Program:
    """One operator as a program.

    Args:
        call: Its arguments refer to `examples` by Input.
    """
    graph = OperatorGraph([Operator(0, name, target)], [[]])
    return Program(graph, [call], [Output(0)], tree_structure([0]), tuple(examples))


def together(programs: Sequence[Program]) -> Program:
    """Programs side by side in one, none of which reads another's outputs; inputs and outputs in their order."""
    calls: list[Call] = []
    operators: list[Operator] = []
    predecessors: list[list[int]] = []
    outputs: list[Any] = []
    examples: list[Tensor] = []
    for program in programs:
        first, first_input = len(operators), len(examples)

        def moved(argument: Any, first: int = first, first_input: int = first_input) -> Any:
            if isinstance(argument, Output):
                return Output(first + argument.operator, argument.index)
            return Input(first_input + argument.index) if isinstance(argument, Input) else argument

        calls += [call.map(moved) for call in program.calls]
        operators += [Operator(first + o.id, o.name, o.target) for o in program.graph.operators]
        predecessors += [[first + u for u in before] for before in program.graph.predecessors]
        outputs += map(moved, program.outputs)
        examples += program.examples
    graph = OperatorGraph(operators, predecessors)
    return Program(graph, calls, outputs, tree_structure([0] * len(outputs)), tuple(examples))


def example(value: Any, device: torch.device) -> Tensor:
    """A tensor of the shape, dtype and strides of `value`: random where it is of floating point, else zero.

    Raises:
        Unsupported: it is a number that an operator computes.
    """
    if not isinstance(value, Tensor):
        raise Unsupported("an operator reads a number that another computes, so it cannot be measured alone")
    steps = zip(value.shape, value.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps) if value.numel() else -1
    memory = torch.empty(last + 1, dtype=value.dtype, device=device)  # elements of an expanded dimension share a place
    if value.dtype.is_floating_point and device.type != "meta":
        own = torch.Generator(device).manual_seed(value.numel())  # the caller's random state stays as it is
        memory.normal_(generator=own)
    else:
        memory.zero_()
    return memory.as_strided(value.shape, value.stride())
