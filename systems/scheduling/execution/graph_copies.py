"""The copies that a captured CUDA Graph makes: from a call's inputs to where its kernels read, and out of where they write.

Copies launched by calls of their own take up to half of a small graph's call: the host launches each of them, and the GPU
pauses between them and the graph.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from cuda.bindings import runtime as cudart
from torch import Tensor

from systems.scheduling.graph.input_check import InputCheck

from .cuda_streams import checked, num_captured
from .members import PLAIN

ON_DEVICE = cudart.cudaMemcpyKind.cudaMemcpyDeviceToDevice


class _Copy:
    """A node that copies between a tensor of the graph's own and one of a call.

    Args:
        own: the graph's tensor, as `can_copy` has it.
        is_input: it copies to `own`, and not from it.
        stream: that is being captured.
    """

    def __init__(self, own: Tensor, is_input: bool, stream: Any):
        self.own, self.is_input, self.strides, self.is_contiguous = own, is_input, own.stride(), own.is_contiguous()
        self.address, self.bytes = own.data_ptr(), own.nbytes
        self.number = num_captured(stream)
        # Each call sets the other end before the node runs; until then both ends are this one.
        checked(cudart.cudaMemcpyAsync(self.address, self.address, self.bytes, ON_DEVICE, stream))
        self.node: Any = None

    def readable(self, x: Tensor) -> Tensor:
        """A call's input, or a copy of it, that lies as `own` does."""
        is_memory = x.__class__ in PLAIN and x.data_ptr() != self.address
        # Slices have other strides in dimensions of size 1, where a stride says nothing.
        if is_memory and (x.stride() == self.strides or (self.is_contiguous and x.is_contiguous())):
            return x
        return torch.empty_like(self.own).copy_(x)


class GraphCopies:
    """Captured as a part of a graph: its first nodes, and its last ones. They are off until a call turns them on.

    What nodes cannot copy, a call copies before and after the launch.

    Invariants:
        A launch with them on copies from and to tensors of the call that it is of.
        Where `reads_inputs`, nodes can read inputs of the last call's form where those lie, unless kernels read there.

    Args:
        device: of the graph.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.static: Sequence[Tensor] = ()
        self.results: Sequence[Any] = ()
        self.inputs: dict[int, _Copy] = {}  # by the input's place
        self.outputs: dict[int, _Copy] = {}  # by the result's place
        self.copies: list[_Copy] = []  # all of them, the inputs' first
        self.others: list[int] = []  # the address of the call's tensor, of each of the copies
        self.own: set[int] = set()  # addresses where kernels read inputs that nodes copy
        self.input_check = InputCheck(())
        self.reads_inputs = False  # themselves, and no copies of them
        self.filled: list[int] = []  # places of the inputs that calls copy
        self.cloned: list[int] = []  # and of the results
        self.is_on = False
        self.exec: Any = None

    def capture_inputs(self, static: Sequence[Tensor], stream: Any) -> None:
        """Args:
        static: where kernels read each input.
        stream: all that is captured follows what is captured on it now.
        """
        self.static, self.input_check = static, InputCheck(static)
        self.inputs = {i: _Copy(x, True, stream) for i, x in enumerate(static) if can_copy(x, self.device)}
        self.own = {copy.address for copy in self.inputs.values()}
        self.filled = [i for i, x in enumerate(static) if x.numel() and i not in self.inputs]

    def capture_outputs(self, outputs: Sequence[Any], keeps: Callable[[Tensor], bool], stream: Any) -> None:
        """Args:
        outputs: that calls return copies of, flat; what is no tensor goes as it is.
        keeps: of a tensor, whether it lies where it does for as long as the graph lives. Others are copied by calls.
        stream: it follows all that is captured.
        """
        self.results = outputs
        tensors = {i: output for i, output in enumerate(outputs) if isinstance(output, Tensor)}
        self.outputs = {i: _Copy(x, False, stream) for i, x in tensors.items() if can_copy(x, self.device) and keeps(x)}
        self.cloned = [i for i in tensors if i not in self.outputs]

    def bind(self, graph: Any, graph_exec: Any) -> None:
        """Args:
        graph: as captured; it has to live as long as `graph_exec`, made of it.
        """
        self.exec, self.copies = graph_exec, [*self.inputs.values(), *self.outputs.values()]
        self.others = [0] * len(self.copies)
        if self.copies:
            nodes, _ = checked(cudart.cudaGraphGetNodes(graph, max(copy.number for copy in self.copies) + 1))
            for copy in self.copies:
                copy.node = nodes[copy.number]
            self._switch(False)

    def run(self, inputs: Sequence[Tensor], launch: Callable[[], object]) -> list[Any]:
        """A call's outputs.

        Args:
            inputs: of the call.
            launch: the graph, on the current stream.

        Raises:
            ValueError: the inputs have other shapes, dtypes or another device than the static ones.
        """
        read, addresses = self._read(inputs)
        written = [torch.empty_like(copy.own) for copy in self.outputs.values()]
        is_within = self._turned_on([*addresses, *(x.data_ptr() for x in written)])
        for i in self.filled:
            self.static[i].copy_(inputs[i], non_blocking=True)
        if not is_within:
            for copy, x in zip(self.inputs.values(), read, strict=True):
                copy.own.copy_(x)
        launch()
        outputs = list(self.results)
        for (i, copy), output in zip(self.outputs.items(), written, strict=True):
            outputs[i] = output if is_within else output.copy_(copy.own)
        for i in self.cloned:
            outputs[i] = outputs[i].clone()
        return outputs

    def close(self) -> None:
        """Let go of the graph's tensors."""
        self.static, self.results, self.inputs, self.outputs, self.copies = (), (), {}, {}, []
        self.input_check = InputCheck(())

    def turn_off(self) -> None:
        """The next launch runs the kernels alone, on what lies in the static inputs."""
        if self.is_on:
            self._switch(False)

    def _read(self, inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[int]]:
        """What the nodes read, of the call's inputs or of copies of them, and where that lies. Raises as `run`."""
        if self.input_check.is_known(inputs) and self.reads_inputs:
            read = [inputs[i] for i in self.inputs]
            addresses = [*map(Tensor.data_ptr, read)]
            if self.own.isdisjoint(addresses):
                return read, addresses
        read = [copy.readable(inputs[i]) for i, copy in self.inputs.items()]
        self.reads_inputs = all(x is inputs[i] for i, x in zip(self.inputs, read, strict=True))
        return read, [*map(Tensor.data_ptr, read)]

    def _turned_on(self, addresses: list[int]) -> bool:
        """The next launch copies from and to these addresses, one a copy.

        False, and off, where CUDA refuses one of them, as it may where that is memory of another kind.
        """
        if addresses != self.others:
            with torch.cuda.device(self.device):
                for k, (copy, new) in enumerate(zip(self.copies, addresses, strict=True)):
                    if new == self.others[k]:
                        continue
                    ends = (copy.address, new) if copy.is_input else (new, copy.address)
                    setting = self.exec, copy.node, *ends, copy.bytes, ON_DEVICE
                    (status,) = cudart.cudaGraphExecMemcpyNodeSetParams1D(*setting)
                    if status != cudart.cudaError_t.cudaSuccess:
                        self.turn_off()
                        return False
                    self.others[k] = new
        if not self.is_on:
            self._switch(True)
        return True

    def _switch(self, is_on: bool) -> None:
        with torch.cuda.device(self.device):
            for copy in self.copies:
                checked(cudart.cudaGraphNodeSetEnabled(self.exec, copy.node, int(is_on)))
        self.is_on = is_on


def can_copy(tensor: Tensor, device: torch.device) -> bool:
    """Is a copy of its memory a copy of it, and does a GPU's graph reach that memory?"""
    if tensor.__class__ not in PLAIN or tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        return False
    is_dense = torch.empty_like(tensor, device="meta").stride() == tensor.stride()
    return tensor.device == device and tensor.nbytes > 0 and is_dense
