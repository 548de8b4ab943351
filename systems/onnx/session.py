"""A session of ONNX Runtime that reads and writes torch's own memory."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# onnx.TensorProto.DataType
ELEMENT_TYPES = {
    torch.float32: 1,
    torch.uint8: 2,
    torch.int8: 3,
    torch.int16: 5,
    torch.int32: 6,
    torch.int64: 7,
    torch.bool: 9,
    torch.float16: 10,
    torch.float64: 11,
    torch.bfloat16: 16,
}


class BoundSession:
    """A session over an exported ONNX file. Nothing is copied on the way in or out.

    Args:
        session: An onnxruntime.InferenceSession.
        run_options: An onnxruntime.RunOptions, for every run.
    """

    def __init__(self, session: Any, run_options: Any = None):
        self.session, self.run_options = session, run_options
        self.binding = session.io_binding()
        # Inputs keep their order and number, not their names: one that is an output too is renamed.
        self.inputs = [i.name for i in session.get_inputs()]
        self.outputs = [o.name for o in session.get_outputs()]

    def bind(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Have the next runs read these inputs of the module and write these outputs, all of them contiguous."""
        self.bound = inputs, outputs  # the binding knows their addresses only
        for name, x in zip(self.inputs, inputs, strict=True):
            self.binding.bind_input(name, *_place(x))
        for name, output in zip(self.outputs, outputs, strict=True):
            self.binding.bind_output(name, *_place(output))

    def run(self) -> None:
        self.session.run_with_iobinding(self.binding, self.run_options)


def _place(tensor: Tensor) -> tuple[str, int, int, list[int], int]:
    """A tensor's device, its index, element type, shape and address, as ONNX Runtime takes them."""
    device = tensor.device
    return device.type, device.index or 0, ELEMENT_TYPES[tensor.dtype], list(tensor.shape), tensor.data_ptr()
