"""Replaces groups of operators of a program by one operator each, for every rewriting pass."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any, Protocol, runtime_checkable

from torch._ops import OpOverload

from .derived import Derived
from .operator_graph import Operator, OperatorGraph
from .program import Call, Output, Program


@dataclass(frozen=True)
class Replacement:
    """One new operator in the place of some operators of the program that is rewritten.

    Args:
        operators: Ids of the replaced operators.
        call: How the new operator is executed; its arguments refer to outputs and inputs of the program that is rewritten. A
            Call among them becomes an operator of its own, one for each Call object, wherever that stands.
        results: For each replaced operator that is still read, the output of the new one that stands for its output; None
            for the only output.
        derived: The tensors among the arguments that were computed for it.
    """

    operators: tuple[int, ...]
    name: str
    target: str
    call: Call
    results: dict[int, int | None]
    derived: tuple[Derived, ...] = ()


@runtime_checkable
class Named(Protocol):
    """A function that has its own name as an operator."""

    @property
    def target(self) -> str: ...


Key = tuple[int, int]  # an old operator's id and 0, or what comes before it and a negative number


def replace(
    program: Program, replacements: Sequence[Replacement], outputs: Sequence[Any] | None = None
) -> tuple[Program, dict[int, int]]:
    """Make every replacement in `program`.

    Invariant: the operators of the new program stand in a topological order, the old order where that is one. A new operator
    stands where the last operator that it replaces stood, behind the Calls among its arguments.

    Args:
        outputs: Of the new program, in terms of the old one, if they are not the old one's; Calls may be among them.

    Returns:
        The new program, and for each old operator the id of the operator that does its work now.

    Raises:
        ValueError: Two replacements share an operator, an operator without a result is still read, or the new operators
            would depend on each other in a cycle.
    """
    n = len(program.graph)
    owner = list(range(n))  # the last of the group that each old operator is replaced with
    made: dict[int, Replacement] = {}
    replaced: set[int] = set()
    for r in replacements:
        if replaced & set(r.operators):
            raise ValueError(f"{r.name} replaces an operator that another replacement takes")
        replaced |= set(r.operators)
        made[max(r.operators)] = r
        for v in r.operators:
            owner[v] = max(r.operators)
    outputs = program.outputs if outputs is None else tuple(outputs)
    calls: dict[Key, Call] = {(v, 0): made[v].call if v in made else program.calls[v] for v in range(n) if owner[v] == v}
    added: dict[int, Key] = {}  # by the identity of a Call among the arguments
    read: dict[Key, list[Key]] = {}

    def reads(key: Key, arguments: Sequence[Any]) -> list[Key]:
        keys = []
        for argument in arguments:
            if isinstance(argument, Call):
                if id(argument) not in added:
                    added[id(argument)] = own = (key[0], -1 - len(added))
                    calls[own] = argument
                    read[own] = reads(own, argument.leaves())
                keys.append(added[id(argument)])
            elif isinstance(argument, Output):
                keys.append((owner[argument.operator], 0))
        return keys

    for key, call in list(calls.items()):
        read[key] = reads(key, call.leaves())
    reads((n, 0), outputs)
    order = _topological(read)
    place = {key: i for i, key in enumerate(order)}

    def moved(argument: Any) -> Any:
        if isinstance(argument, Call):
            return Output(place[added[id(argument)]])
        if not isinstance(argument, Output):
            return argument
        old, group = argument.operator, owner[argument.operator]
        if group not in made:
            return Output(place[old, 0], argument.index)
        if old not in made[group].results:
            raise ValueError(f"{made[group].name} computes the output of operator {program.graph.label(old)} no more")
        index = made[group].results[old]
        if index is not None and argument.index is not None:
            raise ValueError(f"operator {program.graph.label(old)} has several outputs")
        return Output(place[group, 0], argument.index if index is None else index)

    operators = []
    for i, (v, before) in enumerate(order):
        if before:
            operators.append(_operator(i, calls[v, before].function))
        else:
            of: Operator | Replacement = made.get(v, program.graph.operators[v])
            operators.append(Operator(i, of.name, of.target))
    graph = OperatorGraph(operators, [[place[u] for u in read[key]] for key in order])
    derived = program.derived + [d for r in replacements for d in r.derived]
    moved_calls = [calls[key].map(moved) for key in order]
    rewritten = Program(graph, moved_calls, [moved(o) for o in outputs], program.output_spec, program.examples, derived)
    return rewritten, {v: place[owner[v], 0] for v in range(n)}


def _operator(i: int, function: object) -> Operator:
    """Of a Call among the arguments: PyTorch's operator, or a kernel of this project."""
    if isinstance(function, OpOverload):
        return Operator(i, function._schema.name.split("::")[1], str(function))
    assert isinstance(function, Named)
    return Operator(i, type(function).__name__.lower(), function.target)


def without(program: Program, unread: Collection[int]) -> Program:
    """`program` without some operators. Raises KeyError where one of them is read."""
    remaining = [v for v in range(len(program.graph)) if v not in set(unread)]
    place = {v: i for i, v in enumerate(remaining)}

    def moved(argument: Any) -> Any:
        return Output(place[argument.operator], argument.index) if isinstance(argument, Output) else argument

    operators = [
        Operator(i, program.graph.operators[v].name, program.graph.operators[v].target) for i, v in enumerate(remaining)
    ]
    graph = OperatorGraph(operators, [[place[u] for u in program.graph.predecessors[v]] for v in remaining])
    calls, outputs = [program.calls[v].map(moved) for v in remaining], [moved(o) for o in program.outputs]
    return Program(graph, calls, outputs, program.output_spec, program.examples, program.derived)


def _topological(read: dict[Key, list[Key]]) -> list[Key]:
    """The keys of `read`, each after the keys that it reads; the smallest first if several could be next.

    Invariant: `waiting[v]` counts the producers of v that are not in `order`, and `ready` is the heap of keys that wait for
    none and are not in `order`.
    """
    waiting = {v: len(set(producers)) for v, producers in read.items()}
    readers: dict[Key, list[Key]] = {v: [] for v in read}
    for v, producers in read.items():
        for u in set(producers):
            readers[u].append(v)
    ready = [v for v, count in waiting.items() if count == 0]
    heapify(ready)
    order = []
    while ready:
        order.append(u := heappop(ready))
        for v in readers[u]:
            waiting[v] -= 1
            if waiting[v] == 0:
                heappush(ready, v)
    if len(order) < len(read):
        raise ValueError("the new operators would depend on each other in a cycle")
    return order
