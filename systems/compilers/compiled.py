"""Executables of other people's compilers, called with torch's tensors: what their adapters share."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from systems.base import Compilation, Prepared
from systems.pytorch.cuda_graph import CapturedModule
from systems.scheduling.graph.input_check import InputCheck

from .exported import Exported


class Compiled(Prepared):
    """An executable for one shape of inputs; a subclass says how it runs. Outputs stay valid after later calls.

    A compiler chooses its own layouts inside. It takes and returns contiguous tensors, so that an input in channels_last is
    converted first, within the call.

    Args:
        exported: What was compiled.
        bytes_before: `bytes_outside_torch` from before the executable was loaded.
        compilation: How it was made, for a record.
    """

    def __init__(self, exported: Exported, bytes_before: int, compilation: Compilation):
        self.exported, self.bytes_before = exported, bytes_before
        self.compilation = compilation
        self.input_check = InputCheck(exported.inputs)

    @property
    def memory(self) -> dict[str, int]:
        """Bytes on a GPU, by name.

        Returns:
            outside_torch: What the device has come to hold beside torch's allocator since before this was loaded, without
                own_weights.
            own_weights: The executable's own copy of the model's weights.
        """
        if self.exported.device.type != "cuda":
            return {}
        weights = self.exported.weight_bytes
        added = bytes_outside_torch(self.exported.device) - self.bytes_before
        return {"outside_torch": max(0, added - weights), "own_weights": weights}

    @torch.no_grad()
    def __call__(self, *inputs: Tensor) -> Any:
        self.input_check.is_known(inputs)  # raises where they are wrong
        arguments = [x.contiguous() for x in (*inputs, *self.exported.state)]
        return self.exported.settled(self.run(arguments))

    @abstractmethod
    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run the executable, ordered on torch's current stream.

        Args:
            inputs: The arguments of the exported program, contiguous, of the shapes prepared for.

        Returns:
            The program's output tensors, in order; a written buffer itself where its new value is there already.
        """


class Captured(Prepared):
    """A compiled executable, captured into one CUDA Graph.

    Raises:
        Unsupported: It cannot be captured.
    """

    is_captured = True

    def __init__(self, compiled: Compiled):
        self.compiled = compiled
        self.graph = CapturedModule(compiled, compiled.exported.inputs, compiled.exported.restored)
        self.compilation = compiled.compilation

    @property
    def memory(self) -> dict[str, int]:
        return self.compiled.memory | self.graph.memory

    def __call__(self, *inputs: Tensor) -> Any:
        outputs = self.graph(*inputs)
        torch.autograd.graph.increment_version(self.compiled.exported.written)  # a replay writes them unseen by autograd
        return outputs

    def without_copies(self, *inputs: Tensor) -> Callable[[], object]:
        return self.graph.without_copies(*inputs)

    def close(self) -> None:
        self.graph.close()
        self.compiled.close()


class StaticBuffers:
    """Inputs and outputs at fixed addresses, which an executable is captured into a CUDA Graph with.

    A call copies its inputs in, and copies the outputs out, so that they stay valid. State that is contiguous is read where
    it lies. What is written of it is not copied out.

    Args:
        outputs: Tensors for the program's outputs.
    """

    def __init__(self, exported: Exported, outputs: list[Tensor]):
        copies = [torch.empty_like(x, memory_format=torch.contiguous_format).copy_(x) for x in exported.inputs]
        self.inputs = [*copies, *(x.contiguous() for x in exported.state)]
        self.outputs, self.num_own = outputs, len(outputs) - len(exported.written)

    def fill(self, inputs: Sequence[Tensor]) -> None:
        for static, x in zip(self.inputs, inputs, strict=True):
            if static is not x:
                static.copy_(x, non_blocking=True)

    def copied_outputs(self) -> list[Tensor]:
        return [*(x.clone() for x in self.outputs[: self.num_own]), *self.outputs[self.num_own :]]


def empty_outputs(exported: Exported) -> list[Tensor]:
    """Contiguous tensors for the program's outputs, on the module's device."""
    return [torch.empty(tuple(o.shape), dtype=o.dtype, device=exported.device) for o in exported.outputs()]


def bytes_outside_torch(device: torch.device) -> int:
    """Bytes of the device's memory in use by others than torch's allocator; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)
