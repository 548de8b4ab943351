"""The copies that a captured CUDA Graph makes: from a call's inputs to where its kernels read, and out of where they write.

Copies launched by calls of their own take up to half of a small graph's call: the host launches each of them, and the GPU
pauses between them and the graph.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from cuda.bindings import runtime as cudart
from torch import Tensor

from .cuda_streams import checked
from .members import PLAIN
from .node_priorities import num_captured

ON_DEVICE = cudart.cudaMemcpyKind.cudaMemcpyDeviceToDevice


class _Copy:
    """A node that copies between a tensor of the graph's own and one of a call.

    Args:
        own: dense, not empty.
        stream: that is being captured.
    """

    def __init__(self, own: Tensor, stream: Any):
        self.own, self.strides = own, own.stride()
        self.address, self.bytes = own.data_ptr(), own.nbytes
        self.number = num_captured(stream)
        checked(cudart.cudaMemcpyAsync(self.address, self.address, self.bytes, ON_DEVICE, stream))  # calls say with whom
        self.node: Any = None
        self.other = 0  # the address of the call's tensor


class GraphCopies:
    """Captured as a part of a graph: its first nodes, and its last ones. They are off until a call turns them on.

    Invariant: a launch with them on copies from and to tensors of the call that it is of.

    Args:
        device: of the graph.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.inputs: list[_Copy | None] = []  # None of an empty one
        self.outputs: list[_Copy] = []
        self.results: Sequence[Any] = []
        self.copied: list[int] = []  # places of the results that the graph copies
        self.cloned: list[int] = []  # and of the tensors that it does not
        self.is_on = False
        self.exec: Any = None

    def capture_inputs(self, static: Sequence[Tensor], stream: Any) -> None:
        """Args:
        static: where kernels read each input, dense.
        stream: all that is captured follows what is captured on it now.
        """
        self.inputs = [_Copy(tensor, stream) if tensor.nbytes else None for tensor in static]

    def capture_outputs(self, outputs: Sequence[Any], keeps: Callable[[Tensor], bool], stream: Any) -> None:
        """Args:
        outputs: that calls return copies of, flat; what is no tensor goes as it is.
        keeps: of a tensor, whether it lies where it does for as long as the graph lives. Others are copied by calls.
        stream: it follows all that is captured.
        """
        self.results = outputs
        tensors = [place for place, output in enumerate(outputs) if isinstance(output, Tensor)]
        self.copied = [place for place in tensors if can_copy(outputs[place]) and keeps(outputs[place])]
        self.cloned = [place for place in tensors if place not in self.copied]
        self.outputs = [_Copy(outputs[place], stream) for place in self.copied]

    def bind(self, graph: Any, graph_exec: Any) -> None:
        """Args:
        graph: as captured; it has to live as long as `graph_exec`, made of it.
        """
        self.exec = graph_exec
        if copies := self._all():
            nodes, _ = checked(cudart.cudaGraphGetNodes(graph, max(copy.number for copy in copies) + 1))
            for copy in copies:
                copy.node = nodes[copy.number]
            self._switch(False)

    def run(self, inputs: Sequence[Tensor], launch: Callable[[], object]) -> list[Any]:
        """A call's outputs.

        Args:
            inputs: of the static inputs' shapes, dtypes and device.
            launch: the graph, on the current stream.
        """
        copied, _held = self._turned_on(inputs)
        launch()
        outputs = list(self.results)
        for place, output in zip(self.copied, copied, strict=True):
            outputs[place] = output
        for place in self.cloned:
            outputs[place] = outputs[place].clone()
        return outputs

    def turn_off(self) -> None:
        """The next launch runs the kernels alone, on what lies in the static inputs."""
        if self.is_on:
            self._switch(False)

    def _turned_on(self, inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The next launch copies from `inputs` and to new tensors: those, and what has to live until it is launched."""
        held = []
        for copy, x in zip(self.inputs, inputs, strict=True):
            if copy is None:
                continue
            lies_alike = x.__class__ in PLAIN and x.stride() == copy.strides and not x.is_conj() and not x.is_neg()
            if not lies_alike or x.data_ptr() == copy.address or not self._aim(copy, x, is_input=True):
                x = torch.empty_like(copy.own).copy_(x)
                held.append(x)
                if not self._aim(copy, x, is_input=True):
                    raise RuntimeError(f"a copy within the graph cannot read {list(x.shape)} of {x.dtype}")
        outputs = [torch.empty_like(copy.own) for copy in self.outputs]
        for copy, output in zip(self.outputs, outputs, strict=True):
            if not self._aim(copy, output, is_input=False):
                raise RuntimeError(f"a copy within the graph cannot write {list(output.shape)} of {output.dtype}")
        if not self.is_on:
            self._switch(True)
        return outputs, held

    def _aim(self, copy: _Copy, tensor: Tensor, is_input: bool) -> bool:
        """Have a copy read or write a call's tensor; whether CUDA lets it, as it may not for memory of another kind."""
        address = tensor.data_ptr()
        if address == copy.other:
            return True
        target, source = (copy.address, address) if is_input else (address, copy.address)
        with torch.cuda.device(self.device):
            setting = self.exec, copy.node, target, source, copy.bytes, ON_DEVICE
            (status,) = cudart.cudaGraphExecMemcpyNodeSetParams1D(*setting)
        if status != cudart.cudaError_t.cudaSuccess:
            return False
        copy.other = address
        return True

    def _switch(self, is_on: bool) -> None:
        with torch.cuda.device(self.device):
            for copy in self._all():
                checked(cudart.cudaGraphNodeSetEnabled(self.exec, copy.node, int(is_on)))
        self.is_on = is_on

    def _all(self) -> list[_Copy]:
        return [copy for copy in (*self.inputs, *self.outputs) if copy is not None]


def can_copy(output: Tensor) -> bool:
    """Is a copy of its memory a copy of it?"""
    if output.layout is not torch.strided or output.is_conj() or output.is_neg():
        return False
    return output.nbytes > 0 and torch.empty_like(output, device="meta").stride() == output.stride()
