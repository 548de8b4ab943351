"""A module as torch.export captures it, with digests that identify the model: every compiler starts from it."""

import hashlib
import warnings
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, TensorArgument
from torch.utils._pytree import tree_unflatten

from conf.text import first_line
from systems.base import Unsupported
from systems.preparing import collector_off
from systems.scheduling.graph.examples import stand_ins
from systems.scheduling.graph.program import describe

STATISTICS = ("training", "use_input_stats")  # arguments with which a normalisation writes its running statistics
CONVOLUTION = "conv"  # every convolution of ATen has it in its name


class Exported:
    """A module in eval form, exported at the shapes of `inputs`.

    Raises:
        Unsupported: torch.export refuses the module; an input is no dense tensor; the module changes its own state or
            inputs, or returns anything but constants and tensors whose shapes follow from the inputs' shapes. The reason is
            one line.
    """

    def __init__(self, module: nn.Module, inputs: tuple[Tensor, ...]):
        own_inputs = stand_ins(inputs)
        self.inputs = inputs
        self.label = f"{type(module).__name__} {', '.join(describe(x).partition(' on ')[0] for x in inputs)}"
        try:
            with torch.no_grad(), collector_off(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.program: ExportedProgram = torch.export.export(module, own_inputs, strict=False)
        except Exception as error:  # export raises whatever the model's own Python does
            raise Unsupported(f"torch.export cannot capture it: {type(error).__name__}: {first_line(error)}") from error
        self.program.example_inputs = (inputs, {})  # else it would hold on to the stand-ins
        if changed := _changed(self.program):
            raise Unsupported(f"it changes {changed}")
        for spec in self.program.graph_signature.output_specs:
            if not isinstance(spec.arg, TensorArgument | ConstantArgument):
                raise Unsupported(f"it returns a {type(spec.arg).__name__}, which is no tensor")
        if any(not isinstance(size, int) for output in self.outputs() for size in output.shape):
            raise Unsupported("the shape of what it returns depends on the values of its inputs")

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
        digest.update(repr([(describe(x), x.stride()) for x in self.inputs]).encode())
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
        """Fake tensors with the shapes and dtypes of the tensors that the module returns, in order."""
        arguments = next(n for n in self.program.graph.nodes if n.op == "output").args[0]
        return [a.meta["val"] for a in arguments if isinstance(a, fx.Node)]

    def unflatten(self, tensors: Sequence[Tensor]) -> Any:
        """What the module returns, made of its output tensors in order.

        Raises:
            ValueError: It returns another number of tensors.
        """
        remaining = iter(tensors)
        specs = [spec.arg for spec in self.program.graph_signature.output_specs]
        if (expected := sum(isinstance(arg, TensorArgument) for arg in specs)) != len(tensors):
            raise ValueError(f"{len(tensors)} outputs in the place of {expected}")
        leaves = [next(remaining) if isinstance(arg, TensorArgument) else arg.value for arg in specs]  # type: ignore[union-attr]
        assert self.program.call_spec.out_spec is not None
        return tree_unflatten(leaves, self.program.call_spec.out_spec)


def _changed(program: ExportedProgram) -> str | None:
    """Which parameter, buffer or input an operator writes, itself or a view of it, in words; None without one.

    Functionalising the program would say so too, but takes as long again as exporting it. An operator in place does no harm
    where it writes an intermediate.

    Invariant: `may_be[node]` names the parameter, buffer or input whose memory the node may share.
    """
    specs = program.graph_signature.input_specs
    inputs = {s.arg.name: f"its own state in a forward pass ({s.target})" for s in specs if s.target}
    inputs |= {s.arg.name: f"its input {s.arg.name} in place" for s in specs if not s.target}
    may_be: dict[fx.Node, str] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            may_be[node] = inputs[node.name]
        elif isinstance(node.target, torch._ops.OpOverload):
            declared = node.target._schema.arguments
            arguments = dict(zip((a.name for a in declared), node.args, strict=False)) | node.kwargs
            aliases = [(arguments.get(a.name), a.alias_info.is_write) for a in declared if a.alias_info is not None]
            if any(arguments.get(flag) is True for flag in STATISTICS):
                aliases.append((arguments.get("running_mean"), True))
            for x, is_written in [(x, is_write) for x, is_write in aliases if isinstance(x, fx.Node) and x in may_be]:
                if is_written:
                    return may_be[x]
                may_be[node] = may_be[x]
    return None


def _kind(value: Any) -> Any:
    return (value.dtype, tuple(value.shape)) if isinstance(value, Tensor) else value
