"""A module as torch.export captures it, with digests that identify the model: every compiler starts from it."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, InputSpec, TensorArgument
from torch.func import functional_call
from torch.utils._pytree import tree_unflatten

from conf.text import counted
from systems.base import Unsupported
from systems.scheduling.graph.exporting import export
from systems.scheduling.graph.program import describe
from systems.training.restore import restored

STATISTICS = ("training", "use_input_stats")  # arguments with which a normalisation writes its running statistics
CONVOLUTION = "conv"  # every convolution of ATen has it in its name


class Exported:
    """A module in eval form, exported at the shapes of `inputs`.

    Where the module writes buffers, `program` takes all buffers that it reads as further inputs, so that the caller may
    change them between calls. It returns what it leaves in the written ones as further outputs, and writes nothing itself.

    Args:
        module: Its buffers stay where they are for as long as this is used.
        inputs: Of the shapes, dtypes and device that calls will have.

    Attributes:
        state: The module's buffers that the program takes behind its inputs; none where the module writes none.
        written: Those of `state` that the program returns behind the module's own outputs, in that order.

    Raises:
        Unsupported: torch.export refuses the module; an input is no dense tensor; the module changes its parameters, its
            inputs or running statistics; it returns anything but constants and tensors whose shapes follow from the inputs'
            shapes. The reason is one line.
    """

    def __init__(self, module: nn.Module, inputs: tuple[Tensor, ...]):
        self.inputs = inputs
        self.label = f"{type(module).__name__} {', '.join(describe(x).partition(' on ')[0] for x in inputs)}"
        self.state: tuple[Tensor, ...] = ()
        self.written: tuple[Tensor, ...] = ()
        self.program = export(module, inputs)
        if written := _written(self.program):
            self.program = self._with_state(module, written)
        self.program.example_inputs = (self.arguments, {})  # else it would hold on to the stand-ins
        for spec in self.program.graph_signature.output_specs:
            if not isinstance(spec.arg, TensorArgument | ConstantArgument):
                raise Unsupported(f"it returns a {type(spec.arg).__name__}, which is no tensor")
        if any(not isinstance(size, int) for output in self.outputs() for size in output.shape):
            raise Unsupported("the shape of what it returns depends on the values of its inputs")

    def _with_state(self, module: nn.Module, written: Sequence[str]) -> ExportedProgram:
        """The program over buffers as inputs, and `written` of them as outputs; sets `state` and `written`."""
        is_read = {node.name for node in self.program.graph.nodes if node.op == "placeholder" and node.users}
        specs = self.program.graph_signature.input_specs
        buffers = dict(module.named_buffers(remove_duplicate=False))
        names = [s.target for s in specs if s.kind is InputKind.BUFFER and s.arg.name in is_read and s.target is not None]
        self.state, self.written = tuple(buffers[name] for name in names), tuple(buffers[name] for name in written)
        program = export(_Stateless(self.program, names, written), self.arguments)
        assert not _written(program)
        return program

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        """What the program takes: the inputs, then the state."""
        return (*self.inputs, *self.state)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Runs within leave the module's state and the random state as they were."""
        with restored(self.written, [self.device] if self.device.type == "cuda" else []):
            yield

    @property
    def device(self) -> torch.device:
        return self.inputs[0].device

    @cached_property
    def structure(self) -> str:
        """A digest of the operators and the inputs' shapes, dtypes and layouts: the same for other weights."""
        digest = hashlib.sha256()
        for node in self.program.graph.nodes:
            digest.update(f"{node.format_node()}\n".encode())
            digest.update(f"{fx.node.map_aggregate(node.meta.get('val'), _kind)}\n".encode())
        digest.update(repr(self.program.call_spec).encode())
        digest.update(repr([(describe(x), x.stride()) for x in self.arguments]).encode())
        return digest.hexdigest()

    @cached_property
    def content(self) -> str:
        """A digest of the whole model: its structure, and every weight bit by bit."""
        digest = hashlib.sha256(self.structure.encode())
        for tensors in (self.program.state_dict, self.program.constants):
            for name, value in sorted(tensors.items()):
                digest.update(name.encode())
                if isinstance(value, Tensor):
                    digest.update(repr((value.dtype, value.shape)).encode())
                    digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    @cached_property
    def allow_tf32(self) -> bool:
        """May this model compute in TF32?

        PyTorch has one switch for convolutions and one for matrix products, and a compiler may have one for both. This is
        the switch of convolutions if the model has any, else that of matrix products.
        """
        has_convolutions = any(CONVOLUTION in str(n.target) for n in self.program.graph.nodes if n.op == "call_function")
        return torch.backends.cudnn.allow_tf32 if has_convolutions else torch.backends.cuda.matmul.allow_tf32

    @property
    def channels_last(self) -> bool:
        """Is every image among the inputs in channels_last?"""
        images = [x for x in self.inputs if x.dim() == 4]
        return (
            bool(images)
            and all(x.is_contiguous(memory_format=torch.channels_last) for x in images)
            and not any(x.is_contiguous() for x in images)
        )

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of the parameters, buffers and constants."""
        tensors = [*self.program.state_dict.values(), *self.program.constants.values()]
        return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))

    def outputs(self) -> list[Tensor]:
        """Fake tensors with the shapes and dtypes of the program's outputs, in order: the module's own, then the state's."""
        arguments = next(n for n in self.program.graph.nodes if n.op == "output").args[0]
        return [a.meta["val"] for a in arguments if isinstance(a, fx.Node)]

    def settled(self, outputs: Sequence[Tensor]) -> Any:
        """What the module returns, made of the program's outputs; what those say of its state is written into its buffers.

        Raises:
            ValueError: It returns another number of tensors.
        """
        remaining = iter(outputs)
        specs = [spec.arg for spec in self.program.graph_signature.output_specs]
        if (expected := sum(isinstance(arg, TensorArgument) for arg in specs)) != len(outputs):
            raise ValueError(f"{counted(len(outputs), 'output')} in the place of {expected}")
        leaves = [next(remaining) if isinstance(arg, TensorArgument) else arg.value for arg in specs]  # type: ignore[union-attr]
        assert self.program.call_spec.out_spec is not None
        returned = tree_unflatten(leaves, self.program.call_spec.out_spec)
        if not self.written:
            return returned
        own, values = returned
        for buffer, value in zip(self.written, values, strict=True):
            if value is not buffer:  # an executable may have written the buffer itself
                buffer.copy_(value)
        torch.autograd.graph.increment_version(self.written)
        return own


class _Stateless(nn.Module):
    """A program as a function of (*inputs, *buffers), which returns its own outputs and the values of the written buffers.

    Invariant: it writes copies of the buffers alone.

    Args:
        program: It writes buffers in place.
        names: Of the buffers that are taken, in order.
        written: Of those that are returned, in order.
    """

    def __init__(self, program: ExportedProgram, names: Sequence[str], written: Sequence[str]):
        super().__init__()
        self.module: nn.Module = program.module(check_guards=False)
        self.names, self.written = names, written
        for name in names:  # their values are no part of the model
            owner, _, last = name.rpartition(".")
            buffers = self.module.get_submodule(owner)._buffers
            value = buffers[last]
            assert value is not None
            buffers[last] = torch.empty(0, device=value.device)

    def forward(self, *tensors: Tensor) -> Any:
        own = len(tensors) - len(self.names)
        buffers = dict(zip(self.names, tensors[own:], strict=True))
        buffers |= {name: buffers[name].clone() for name in self.written}
        out = functional_call(self.module, buffers, tensors[:own])
        return out, [buffers[name] for name in self.written]


def _written(program: ExportedProgram) -> list[str]:
    """The names of the buffers that operators write, themselves or views of them.

    Functionalising the program would say so too, but takes as long again as exporting it. An operator in place does no harm
    where it writes an intermediate.

    Invariant: `may_be[node]` is the parameter, buffer or input whose memory the node may share.

    Raises:
        Unsupported: An operator writes anything else, or running statistics, or a buffer in whose memory another tensor of
            the module lies.
    """
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    may_be: dict[fx.Node, InputSpec] = {}
    written: dict[str, InputSpec] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            may_be[node] = specs[node.name]
        elif isinstance(node.target, torch._ops.OpOverload):
            declared = node.target._schema.arguments
            arguments = dict(zip((a.name for a in declared), node.args, strict=False)) | node.kwargs
            aliases = [(arguments.get(a.name), a.alias_info.is_write) for a in declared if a.alias_info is not None]
            statistics = arguments.get("running_mean")
            if isinstance(statistics, fx.Node) and any(arguments.get(flag) is True for flag in STATISTICS):
                raise Unsupported(f"it changes {_in_words(may_be[statistics])}")
            for x, is_written in [(x, is_write) for x, is_write in aliases if isinstance(x, fx.Node) and x in may_be]:
                if is_written and may_be[x].kind is not InputKind.BUFFER:
                    raise Unsupported(f"it changes {_in_words(may_be[x])}")
                if is_written:
                    written[str(may_be[x].target)] = may_be[x]
                may_be[node] = may_be[x]
    tensors = {**program.state_dict, **program.constants}
    memory = [t.untyped_storage()._cdata for s in specs.values() if isinstance(t := tensors.get(s.target or ""), Tensor)]
    for name, spec in written.items():
        if memory.count(tensors[name].untyped_storage()._cdata) > 1:
            raise Unsupported(f"it changes {_in_words(spec)}, in whose memory another of its tensors lies")
    return list(written)


def _in_words(spec: InputSpec) -> str:
    return f"its own state in a forward pass ({spec.target})" if spec.target else f"its input {spec.arg.name} in place"


def _kind(value: Any) -> Any:
    return (value.dtype, tuple(value.shape)) if isinstance(value, Tensor) else value
