"""A scheduler as a library: a module in the place of a module, ready for several shapes."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from models.by_name import ByName
from models.module_wrapper import ModuleWrapper
from systems.base import BadOption, Loss
from systems.scheduling.execution.arena import Arena
from systems.scheduling.execution.members import Members
from systems.scheduling.execution.scheduled import Scheduled
from systems.scheduling.execution.training_step import TrainingStep
from systems.scheduling.graph.input_check import InputForm
from systems.scheduling.graph.program import Program, describe
from systems.scheduling.graph.stored_program import answer_of
from systems.scheduling.scheduler import Scheduler

OTHERWISE = ("refuse", "module")
Shape = tuple[tuple[torch.Size, torch.dtype, torch.device, str], ...]  # and the name; "" of inputs by position


@dataclass(frozen=True)
class Axis:
    """A size that a call may have smaller than what was prepared, as a batch or a sequence: what lacks is filled up.

    Whether the filling changes what remains is the model's affair: a mask has to hide it where elements see each other.

    Args:
        inputs: the dimension with this size, by the number of the input, from 0; of at least one. Inputs that go by name are
            numbered as `prepare` has them.
        outputs: likewise, by the number of the output among all tensors that the module returns; they are cut to size. All
            whose size goes with the inputs' are to be named.
        fill: what to fill with along this axis, by the number of the input; 0 where there is none.

    Raises:
        BadOption: one of them is no mapping by whole numbers, or an input is filled that the axis does not name.
    """

    inputs: Mapping[int, int]
    outputs: Mapping[int, int]
    fill: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, kinds in (("inputs", int), ("outputs", int), ("fill", (int, float))):
            mapping = getattr(self, name)
            is_right = isinstance(mapping, Mapping) and all(
                isinstance(key, int) and isinstance(value, kinds) for key, value in mapping.items()
            )
            if not is_right:
                raise BadOption(f"an axis has {name}={mapping!r}: write them by their numbers, such as {{0: 1}}")
        if others := sorted(set(self.fill) - set(self.inputs)):
            raise BadOption(f"an axis fills input {others[0]}, which is none of its inputs")


@dataclass(frozen=True)
class Match:
    """What a call's inputs go into, so that the next call of that form need not look.

    Attributes:
        names: of inputs that go by name.
        form: of the inputs.
        own: their shape.
        prepared: the shape that they go into.
    """

    names: tuple[str, ...]
    form: InputForm
    own: Shape
    prepared: Shape


class ScheduledModule(ModuleWrapper):
    """`ScheduledModule(module, scheduler).prepare(example_inputs)`, then call it like `module`: each call replays a schedule
    made ahead of time.

    Its parameters, buffers and submodules are those of `module` itself, under the same names. So it can stand wherever the
    module does: in a larger module, in an optimizer, in a checkpoint. The next call uses new weights that are written in
    place. Further calls of `prepare` make further shapes ready; all shapes share one arena of device memory. So calls must
    not run at the same time; a call on another stream waits for the last one.

    Args:
        module: in eval form for inference, in training form for steps of training.
        system: that schedules it.
        axes: sizes that are filled up to the nearest prepared one.
        otherwise: what a call of an unprepared shape does: "refuse", or run the "module" itself.

    Raises:
        BadOption: `otherwise` is neither, or `axes` is no sequence of Axis.
        TypeError: `module` is none.
    """

    def __init__(self, module: nn.Module, system: Scheduler, axes: Sequence[Axis] = (), otherwise: str = "refuse"):
        if not isinstance(module, nn.Module):
            raise TypeError(f"module is a {type(module).__name__}, and no module of PyTorch")
        if otherwise not in OTHERWISE:
            raise BadOption(f"otherwise is {otherwise}, not one of {', '.join(OTHERWISE)}")
        if not isinstance(axes, Sequence) or not all(isinstance(axis, Axis) for axis in axes):
            raise BadOption("axes is no list of Axis: write axes=[Axis(...)]")
        super().__init__(module)
        self.system, self.axes, self.otherwise = system, tuple(axes), otherwise
        self.prepared: dict[Shape, Scheduled] = {}
        self.names: dict[frozenset[str], tuple[str, ...]] = {frozenset(): ()}  # of inputs that go by name, in their order
        self.arena = Arena()
        self.lock = threading.Lock()
        self.last_stream: torch.cuda.Stream | None = None
        self.last_match: Match | None = None

    def prepare(
        self,
        example_inputs: Tensor | Sequence[Tensor] | Mapping[str, Tensor],
        training: bool = False,
        **training_arguments: Any,
    ) -> Any:
        """Make calls with inputs of these shapes, dtypes and device ready.

        The module is captured in eval form, whatever form it is in. The module, its statistics and the random state stay as
        they are. What was prepared for the same shape is replaced in the end, and stays where preparing fails.

        Args:
            example_inputs: of the shapes, dtypes and device that calls will have. Those of a mapping, such as a tokenizer
                gives, go by name in calls too.
            training: make one step of training ready instead.
            training_arguments: `optimizer`, `loss` (a function of the module's output and the target) and `example_target`.

        Returns:
            This module, or for training a function `step(*inputs, target) -> loss`.

        Raises:
            Unsupported: the module cannot be captured.
            TypeError: the inputs are no tensors, or several arguments, or those of training go by name.
            ValueError: an axis names no input, or a dimension that an input or an output lacks, or an output of another size
                than the inputs, or leaves out an output whose size goes with them.
        """
        names: tuple[str, ...] = ()
        if not isinstance(training, bool):
            raise TypeError("several inputs are one argument, a tuple: prepare((x, y))")
        if isinstance(example_inputs, Mapping):
            if training:
                raise TypeError("inputs of training go by position, and example_inputs has names")
            names = self.names.get(frozenset(example_inputs), tuple(example_inputs))
            example_inputs = [example_inputs[name] for name in names]
        is_one = isinstance(example_inputs, Tensor) or not isinstance(example_inputs, Iterable)
        inputs = (example_inputs,) if is_one else tuple(example_inputs)
        if not inputs or not all(isinstance(x, Tensor) for x in inputs):
            raise TypeError("example_inputs is a tensor, or a sequence of tensors, or a mapping of tensors by name")
        if training:
            return self._prepare_training(inputs, **training_arguments)
        if training_arguments:
            hint = "inputs by name are one argument, a mapping, and the rest is for training=True alone"
            raise TypeError(f"{', '.join(training_arguments)}: {hint}")
        for axis in self.axes:
            if not axis.inputs:
                raise ValueError("an axis names no input, so that its size is unknown")
            _check_dimensions("input", inputs, axis.inputs)
        called = ByName(self.module, names) if names else self.module
        with _eval_form(self.module):
            prepared = self.system.prepare(called, inputs, arena=self.arena)
        try:
            _check_outputs(prepared.program, self.axes)
            with _eval_form(self.module):
                _check_unnamed(called, inputs, prepared.program, self.axes)
        except BaseException:
            prepared.close()
            raise
        # The schedule is of the eval form, whichever form each part has.
        prepared.module_members = Members(self.module, with_forms=False)
        self.names[frozenset(names)] = names
        shape = _shape(inputs, names)
        if (earlier := self.prepared.get(shape)) is not None:
            earlier.close()
        self.prepared[shape], self.last_match = prepared, None
        return self

    def _prepare_training(
        self,
        inputs: tuple[Tensor, ...],
        *,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        example_target: Tensor,
    ) -> TrainingStep:
        return self.system.prepare_training(self.module, optimizer, loss, inputs, example_target)

    def forward(self, *inputs: Tensor, **named: Tensor) -> Any:
        """The module's output, in eval form and without gradients.

        Args:
            inputs: by position, as in `prepare`.
            named: by name, as in `prepare`, in any order.

        Raises:
            TypeError: some inputs go by position and others by name.
            ValueError: inputs of these shapes, dtypes, names or device were not prepared.
            RuntimeError: the module is in training form, or has other tensors or submodules since, or autocast is another.
        """
        if _is_captured_here():
            return self.module(*inputs, **named)
        if self.training:
            raise RuntimeError("it was prepared for inference: call eval() first, or prepare(..., training=True)")
        if inputs and named and self.otherwise == "refuse":
            raise TypeError(f"{', '.join(named)} goes by name and others by position: all go as in prepare")
        names = self.names.get(frozenset(named), tuple(named))
        values = inputs or tuple(named[name] for name in names)
        own, shape = (None, None) if inputs and named else self._match(values, names)
        if shape is None and self.otherwise == "module":
            with torch.no_grad():
                return self.module(*inputs, **named)
        if shape is None:
            ready = "; ".join(_names(shape) for shape in self.prepared) or "nothing"
            if not values:
                raise ValueError(f"called without inputs, prepared for {ready}")
            descriptions = [f"{name}: {describe(x)}" for name, x in named.items()] or list(map(describe, inputs))
            raise ValueError(f"called with {', '.join(descriptions)}, prepared for {ready}: prepare these inputs too")
        sizes = [_size(axis, values) for axis in self.axes]
        if own != shape:
            values = _filled(values, shape, self.axes)
        with self.lock:
            self._wait_for_last_call(values)
            return _cut(self.prepared[shape](*values), self.axes, sizes)

    def _match(self, values: Sequence[object], names: tuple[str, ...]) -> tuple[Shape | None, Shape | None]:
        """The shape of a call's inputs, None unless they are tensors, and the prepared one that they go into, if any."""
        match = self.last_match
        if match is not None and match.names == names and match.form.is_of(values):
            return match.own, match.prepared
        tensors = [x for x in values if isinstance(x, Tensor)]
        if len(tensors) < len(values):
            return None, None
        own = _shape(tensors, names)
        prepared = self._nearest(own)
        if prepared is not None and all(x.layout is torch.strided for x in tensors):
            self.last_match = Match(names, InputForm(tensors), own, prepared)
        return own, prepared

    def _nearest(self, own: Shape) -> Shape | None:
        """The prepared shape of the fewest elements into which inputs of this shape go; None where there is none."""
        if own in self.prepared:
            return own
        fitting = [shape for shape in self.prepared if _fits(own, shape, self.axes)]
        return min(fitting, key=lambda shape: sum(size.numel() for size, *_ in shape), default=None)

    def _wait_for_last_call(self, inputs: Sequence[Tensor]) -> None:
        """On a GPU, if that was on another stream: calls of all shapes share one arena (WAR)."""
        if not inputs[0].is_cuda:
            return
        stream = torch.cuda.current_stream(inputs[0].device)
        if self.last_stream is not None and self.last_stream != stream:
            stream.wait_stream(self.last_stream)
        self.last_stream = stream

    def close(self) -> None:
        """Give back threads and device memory; the module stays as it is."""
        for prepared in self.prepared.values():
            prepared.close()
        self.prepared.clear()
        self.last_match = None
        self.arena = Arena()

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled: wrap a copy of its module, copy.deepcopy(wrapped.module)"
        )

    def __getattr__(self, name: str) -> Any:
        """The module's own attributes, where this wrapper has none of that name."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)


def _is_captured_here() -> bool:
    """Does this thread capture a larger module, which holds this one? PyTorch's own answer is of all threads."""
    if not torch.compiler.is_exporting():
        return False
    return torch.compiler.is_dynamo_compiling() or torch._C._len_torch_dispatch_stack() > 0


def _shape(inputs: Sequence[Tensor], names: Sequence[str] = ()) -> Shape:
    names = names or [""] * len(inputs)
    return tuple((x.shape, x.dtype, x.device, name) for x, name in zip(inputs, names, strict=True))


def _check_dimensions(kind: str, tensors: Sequence[Tensor], dimensions: Mapping[int, int]) -> None:
    for i, dim in dimensions.items():
        if not 0 <= i < len(tensors) or not -tensors[i].dim() <= dim < tensors[i].dim():
            raise ValueError(f"{kind} {i} has no dimension {dim}, which an axis names")


def _check_outputs(program: Program, axes: Sequence[Axis]) -> None:
    """Raises ValueError unless the program's tensors have the dimensions of the axes, with the inputs' sizes."""
    outputs = [value for value in map(program.value, program.outputs) if isinstance(value, Tensor)]
    for axis in axes:
        _check_dimensions("output", outputs, axis.outputs)
        size = _size(axis, program.examples)
        for i, dim in axis.outputs.items():
            if (own := outputs[i].shape[dim]) != size:
                raise ValueError(f"output {i} has size {own} along dimension {dim}, and the inputs of its axis {size}")


def _check_unnamed(module: nn.Module, inputs: Sequence[Tensor], program: Program, axes: Sequence[Axis]) -> None:
    """Raises ValueError where an output has a size that goes with an axis, which does not name it: nobody would cut it.

    The module is run once with each axis one smaller. One that refuses that says nothing, and is called at its own size.
    """
    own = [value.shape for value in map(program.value, program.outputs) if isinstance(value, Tensor)]
    for axis in axes:
        if (size := _size(axis, inputs)) < 2:
            continue
        smaller = tuple(x.narrow(axis.inputs[i], 0, size - 1) if i in axis.inputs else x for i, x in enumerate(inputs))
        try:
            with torch.no_grad():
                leaves = tree_leaves(answer_of(module, smaller))
        except torch.OutOfMemoryError:
            raise
        except Exception:  # whatever a module raises of a size that it is not made for
            continue
        outputs = [leaf.shape for leaf in leaves if isinstance(leaf, Tensor)]
        if [len(shape) for shape in outputs] != [len(shape) for shape in own]:
            continue
        for i, (less, whole) in enumerate(zip(outputs, own, strict=True)):
            for dim in (
                d for d in range(len(whole)) if less[d] != whole[d] and axis.outputs.get(i) not in (d, d - len(whole))
            ):
                raise ValueError(
                    f"output {i} has size {less[dim]} along dimension {dim} where an axis has {size - 1}, and {whole[dim]} "
                    f"where it has {size}: name it in the axis, outputs={{{i}: {dim}}}"
                )


def _size(axis: Axis, inputs: Sequence[Tensor]) -> int:
    return next(inputs[i].shape[dim] for i, dim in axis.inputs.items())


def _fits(own: Shape, shape: Shape, axes: Sequence[Axis]) -> bool:
    """Do inputs go into a prepared shape: of the same sizes, but for axes along which they are all as much smaller?"""
    if [(len(size), *rest) for size, *rest in own] != [(len(size), *rest) for size, *rest in shape]:
        return False
    widened = [list(size) for size, *_ in own]
    for axis in axes:
        sizes = {
            (own[i][0][dim], shape[i][0][dim]) for i, dim in axis.inputs.items() if i < len(own) and dim < len(own[i][0])
        }
        if len(sizes) != 1 or (pair := sizes.pop())[0] > pair[1]:
            return False
        for i, dim in axis.inputs.items():
            widened[i][dim] = pair[1]
    return widened == [list(size) for size, *_ in shape]


def _filled(inputs: Sequence[Tensor], shape: Shape, axes: Sequence[Axis]) -> tuple[Tensor, ...]:
    """The inputs with what they lack of a prepared shape."""
    filled = list(inputs)
    for axis in axes:
        for i, dim in axis.inputs.items():
            x, lacking = filled[i], list(filled[i].shape)
            if lacking[dim] < shape[i][0][dim]:
                lacking[dim] = shape[i][0][dim] - lacking[dim]
                filled[i] = torch.cat((x, x.new_full(lacking, axis.fill.get(i, 0))), dim)
    return tuple(filled)


def _cut(outputs: Any, axes: Sequence[Axis], sizes: Sequence[int]) -> Any:
    """The outputs, each tensor cut to the sizes that the call had along the axes."""
    if not axes:
        return outputs
    leaves, spec = tree_flatten(outputs)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    for axis, size in zip(axes, sizes, strict=True):
        for i, dim in axis.outputs.items():
            leaves[places[i]] = leaves[places[i]].narrow(dim, 0, size)
    return tree_unflatten(leaves, spec)


def _names(shape: Shape) -> str:
    return ", ".join(
        f"{name}{': ' * bool(name)}{str(dtype).removeprefix('torch.')}{list(size)} on {device}"
        for size, dtype, device, name in shape
    )


@contextmanager
def _eval_form(module: nn.Module) -> Iterator[None]:
    training = [m for m in module.modules() if m.training]
    for m in training:
        m.training = False
    try:
        yield
    finally:
        for m in training:
            m.training = True
