"""One step of training as one graph: forward, loss, backward and the optimizer's updates, with all they change in place.

The trace holds what autograd dispatches, below all decompositions: the kernels of eager execution in their order, with its
in-place operators and its random numbers. It is not functionalised. Batch norm would then copy every running statistic and
lose cuDNN's kernel, and dropout would draw other numbers.

Invariant: the graph's state lists, for each piece of memory that an operator changes, all operators that read or write it.
So `OperatorGraph.with_state` orders every pair with a hazard: read after write (RAW), write after read (WAR) and write after
write (WAW).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.utils._pytree import tree_flatten, tree_leaves

from systems.base import Unsupported
from systems.training.optimizers import StaticOptimizer
from systems.training.update import StoredGradients, Update

from .effects import draws, is_view, written
from .exporting import unschedulable
from .operator_graph import Operator, OperatorGraph, State
from .program import Call, Input, Output
from .stateful_program import StatefulProgram
from .step_trace import StepTrace, storage_of, trace_step

aten = torch.ops.aten
# An optimizer's step becomes so many operators of about equal bytes. All but the last overlap with the rest of backward, so
# that an eighth of the step's time stays exposed. An operator for each parameter would take hundreds of kernels.
UPDATES = 8
RANDOM = -1  # stands for the random generator among the numbers of storages


def capture_step(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[Any, Tensor], Tensor],
    inputs: tuple[Tensor, ...],
    target: Tensor,
    captured_update: bool = True,
) -> tuple[StatefulProgram, Update]:
    """Capture `loss(module(*inputs), target)`, its gradients and the optimizer's step as a Program, without running it.

    Args:
        module: In the form that a step has: training or eval, with or without frozen parameters.
        loss: From the module's output and `target` to a tensor of shape [].
        inputs: Of the module.
        captured_update: The program holds the optimizer's step. Without, it leaves gradients for a step after it.

    Returns:
        The program, whose inputs are `inputs` and `target`, and whose output is the loss; and what it does with gradients.

    Raises:
        Unsupported: The step cannot be traced or scheduled. The reason is one line.
    """
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    trace = trace_step(module, trained, loss, inputs, target)
    update: Update = (StaticOptimizer.of if captured_update else StoredGradients)(optimizer, trace.gradients)
    return _Joint(trace, update, (*inputs, target)).program(), update


@dataclass(eq=False)
class _Memory:
    """Memory that operators touch: a storage, or the random generator.

    Args:
        name: For messages.
        tensors: That lie in it, if it outlives a step.
        made_by: The operator whose output it is, if it is one's.
        readers: Bit mask of the operators that read it.
        writers: Bit mask of the operators that write it, the one that makes it included.
    """

    name: str
    tensors: list[Tensor]
    made_by: int | None = None
    readers: int = 0
    writers: int = 0

    @property
    def changes(self) -> bool:
        """Does any operator write it but the one that makes it? Only then is there a WAR or a WAW on it."""
        return bool(self.writers & ~(0 if self.made_by is None else 1 << self.made_by))


class _Joint:
    """Turns a trace into operators, with each update of parameters behind the last reader of these parameters.

    Invariants: `environment[node]` is what stands for a node in the arguments of later operators. `memory[storage]` has the
    readers and writers among the operators so far. An update comes after the last node that touches its parameters or their
    gradients, so that its write after their reads (WAR) agrees with the order of capture.
    """

    def __init__(self, trace: StepTrace, update: Update, examples: tuple[Tensor, ...]):
        self.trace, self.update, self.examples = trace, update, examples
        self.operators: list[Operator] = []
        self.calls: list[Call] = []
        self.memory: dict[int, _Memory] = {RANDOM: _Memory("the random generator", [])}
        self.own_storage: dict[int, int] = {}  # by the trace's fake storage: the module's
        self.environment: dict[fx.Node, Any] = {}
        self.inputs: list[_Memory] = []
        self._enter_placeholders()
        self._enter_constants()
        self.counters = self._find_counters()
        self.due = self._due_updates()

    def program(self) -> StatefulProgram:
        live = _live(self.trace.graph)
        for node in self.trace.graph.nodes:
            if node in live:
                self._convert(node)
            if node is self.trace.loss:
                num_forward = len(self.operators)
            for parameters in self.due.get(node, ()):
                self._take(parameters)
        changing = [m for m in self.memory.values() if m.changes]
        if inputs := [m.name for m in changing if m in self.inputs]:
            raise Unsupported(f"it changes {inputs[0]} in place")
        state = [State(m.name, m.readers & ~m.writers, m.writers) for m in changing]
        producers = [[o.operator for o in call.references()] for call in self.calls]
        return StatefulProgram(
            OperatorGraph.with_state(self.operators, producers, state),
            self.calls,
            [self.environment[self.trace.loss]],
            tree_flatten(0)[1],
            self.examples,
            changed=[t for m in changing for t in m.tensors],
            random=self.memory[RANDOM].changes,
            num_forward=num_forward,
        )

    def _enter_placeholders(self) -> None:
        nodes = [n for n in self.trace.graph.nodes if n.op == "placeholder"]
        count = len(self.trace.state)
        for (name, tensor), node in zip(self.trace.state.items(), nodes[:count], strict=True):
            self._enter(node, name, tensor)
        for i, node in enumerate(nodes[count:]):
            self.environment[node] = Input(i)
            self.inputs.append(_Memory(f"input {i}", []))
            self.memory.update(dict.fromkeys(self._storages(node), self.inputs[i]))

    def _enter_constants(self) -> None:
        """Tensors that are no part of the module. The trace may give a view of one another fake storage."""
        constants: set[int] = set()
        for node in self.trace.graph.nodes:
            if node.op == "get_attr":
                value = operator.attrgetter(str(node.target))(self.trace.constants)
                self.environment[node] = value
                if isinstance(value, Tensor):
                    self._enter(node, str(node.target), value)
                    constants.add(storage_of(value))
            elif aliased := constants.intersection(self._storages(node.args[0]) if _aliases_first(node) else ()):
                self.own_storage.update(dict.fromkeys(self._storages(node), aliased.pop()))

    def _enter(self, node: fx.Node, name: str, tensor: Tensor) -> None:
        """Have `node` stand for a tensor that outlives the step."""
        self.environment[node] = tensor
        own = storage_of(tensor)
        self.own_storage.update(dict.fromkeys(self._storages(node), own))
        self._own(name, tensor)

    def _own(self, name: str, tensor: Tensor) -> int:
        own = storage_of(tensor)
        self.memory.setdefault(own, _Memory(name, [])).tensors.append(tensor)
        return own

    def _storages(self, node: fx.Node) -> list[int]:
        """The numbers of the storages that the node's value lies in."""
        values = [v for v in tree_leaves(node.meta.get("val")) if isinstance(v, Tensor)]
        return [self.own_storage.get(s, s) for s in dict.fromkeys(map(storage_of, values))]

    def _find_counters(self) -> dict[fx.Node, list[Tensor]]:
        """Buffers that only count (batch norm's num_batches_tracked), by the node at which one operator counts all of them.

        One torch._foreach_add_ counts the buffers of a dtype and step, which saves dozens of kernels. The other nodes that
        count are keys too, of empty lists.
        """
        by_step: dict[tuple[torch.dtype, int], list[fx.Node]] = {}
        for node in self.trace.graph.nodes:
            if node.target is aten.add_.Tensor and not node.users and len(node.all_input_nodes) == 1:
                counter, by = node.all_input_nodes[0], node.args[1]
                tensor = self.environment.get(counter)
                if isinstance(tensor, Tensor) and isinstance(by, int) and not node.kwargs and len(counter.users) == 1:
                    by_step.setdefault((tensor.dtype, by), []).append(node)
        out: dict[fx.Node, list[Tensor]] = {}
        for nodes in by_step.values():
            out[nodes[0]] = [self.environment[node.all_input_nodes[0]] for node in nodes]
            out.update({node: [] for node in nodes[1:]})
        return out

    def _due_updates(self) -> dict[fx.Node, list[list[Tensor]]]:
        """Parameters to update together, by the node after which that is safe.

        There the gradients are written (RAW), and no later node reads or writes the parameters (WAR).
        """
        nodes = list(self.trace.graph.nodes)
        last_touched: dict[int, int] = {}
        for i, node in enumerate(nodes):
            for argument in node.all_input_nodes if node.op == "call_function" else ():
                last_touched.update(dict.fromkeys(self._storages(argument), i))
        number = {node: i for i, node in enumerate(nodes)}
        ready = {p: max(number[g], last_touched.get(storage_of(p), 0)) for p, g in self.trace.gradients.items()}
        due: dict[fx.Node, list[list[Tensor]]] = {}
        share = sum(p.nbytes for p in ready) / UPDATES
        together: list[Tensor] = []
        in_order = sorted(ready, key=ready.__getitem__)
        for p in in_order:
            together.append(p)
            if p is in_order[-1] or sum(q.nbytes for q in together) >= share:
                due.setdefault(nodes[ready[p]], []).append(together)
                together = []
        return due

    def _convert(self, node: fx.Node) -> None:
        if node.op in ("placeholder", "get_attr", "output"):
            return
        arguments: tuple[Any, ...] = fx.map_arg(node.args, self.environment.__getitem__)  # type: ignore[assignment]
        if node.target is operator.getitem:
            source, i = arguments
            self.environment[node] = Output(source.operator, i) if isinstance(source, Output) else source[i]
        elif not isinstance(node.target, OpOverload):
            raise unschedulable(node)
        elif node.target in (aten.alias.default, aten.detach.default):
            self.environment[node] = arguments[0]
        elif is_view(node.target) and not _references(arguments):
            with torch.no_grad():  # of a parameter or buffer: it stays valid as long as that stays where it is
                self.environment[node] = node.target(*arguments, **node.kwargs)
        elif node in self.counters:
            if counters := self.counters[node]:
                self._operator(aten._foreach_add_.Scalar, (counters, node.args[1]), {}, (), map(storage_of, counters))
        elif node.target is aten.convolution_backward.default:
            self._convolution_backward(node, arguments)
        else:
            v = self._traced(node, arguments)
            self.environment[node] = Output(v)

    def _convolution_backward(self, node: fx.Node, arguments: tuple[Any, ...]) -> None:
        """The gradients of input and of weight as two operators, as cuDNN computes them.

        The rest of backward waits for the first only, and the second can run beside it.

        arguments: gradient [N, K, ...], input [N, C, ...], weight [K, C / groups, ...], ..., output_mask [3].
        """
        *rest, (of_input, of_weight, of_bias) = arguments
        masks = [(of_input, False, False), (False, of_weight, of_bias)]
        parts = [self._traced(node, (*rest, list(mask))) if any(mask) else None for mask in masks]
        self.environment[node] = tuple(None if p is None else Output(p, i) for i, p in enumerate([parts[0], *parts[1:] * 2]))

    def _traced(self, node: fx.Node, arguments: tuple[Any, ...]) -> int:
        """Add the node's operator, with its reads and writes; returns its id."""
        assert isinstance(node.target, OpOverload)
        reads = [s for n in node.all_input_nodes for s in self._storages(n)]
        writes = [s for a in tree_leaves(written(node.target, node.args, node.kwargs)) for s in self._storages(a)]
        if draws(node.target, node.args, node.kwargs):
            writes.append(RANDOM)
        keywords = dict(fx.map_arg(dict(node.kwargs), self.environment.__getitem__))  # type: ignore[arg-type, call-overload]
        v = self._operator(node.target, arguments, keywords, reads, writes)
        for storage in self._storages(node):
            if storage not in self.memory:
                self.memory[storage] = _Memory(f"the output of {v} ({self.operators[v].name})", [], v, writers=1 << v)
        return v

    def _take(self, parameters: Sequence[Tensor]) -> None:
        """Add one operator for each of the parameter groups among them.

        arguments: group, parameters [P], gradients [P] of the same shapes, moments by name [P], learning rate [] or None.
        """
        groups: dict[int, list[Tensor]] = {}
        for p in parameters:
            groups.setdefault(self.update.group_of(p), []).append(p)
        for group, members in groups.items():
            moments = self.update.moments_of(members)
            names = {id(t): name for name, t in self.trace.state.items()}
            writes = [storage_of(p) for p in members] if self.update.changes_parameters else []
            for moment, tensors in moments.items():
                writes += [self._own(f"{moment} of {names[id(p)]}", t) for p, t in zip(members, tensors, strict=True)]
            nodes = [self.trace.gradients[p] for p in members]
            arguments = (group, members, [self.environment[n] for n in nodes], moments, self.update.rates[group])
            reads = [s for n in nodes for s in self._storages(n)]
            self._operator(self.update.update, arguments, {}, reads, writes)

    def _operator(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        keywords: Mapping[str, Any],
        reads: Iterable[int],
        writes: Iterable[int],
    ) -> int:
        v = len(self.operators)
        if isinstance(function, OpOverload):
            self.operators.append(Operator(v, function._schema.name.split("::")[1], str(function)))
        else:
            self.operators.append(Operator(v, self.update.name, self.update.target))
        self.calls.append(Call(function, arguments, {**keywords}))
        for storage in reads:
            self.memory[storage].readers |= 1 << v
        for storage in writes:
            self.memory[storage].writers |= 1 << v
        return v


def _live(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that an output needs, and those with an effect.

    Invariant: in reverse order, all users of a node come before it.
    """
    live: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        acts = isinstance(node.target, OpOverload) and (
            written(node.target, node.args, node.kwargs) or draws(node.target, node.args, node.kwargs)
        )
        if node.op == "output" or acts or node in live:
            live.update((node, *node.all_input_nodes))
    return live


def _aliases_first(node: fx.Node) -> bool:
    """Does the operator return memory of its first argument: as a view, or after a write?"""
    returns = node.target._schema.returns if isinstance(node.target, OpOverload) else []
    return any(r.alias_info is not None for r in returns) and isinstance(node.args[0], fx.Node)


def _references(arguments: Any) -> bool:
    """Is any argument known only when the step runs?"""
    return any(isinstance(a, Output | Input) for a in tree_leaves(arguments))
