"""Every system by name; its module is imported only when it is asked for."""

from difflib import get_close_matches
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from systems.base import System

SYSTEMS = {
    "eager": "systems.pytorch.eager:Eager",
    "torchscript": "systems.pytorch.torchscript:TorchScript",
    "torch_compile": "systems.pytorch.torch_compile:TorchCompile",
    "tvm": "systems.tvm.system:Tvm",
    "onnxruntime": "systems.onnx.runtime:OnnxRuntime",
    "tensorrt": "systems.tensorrt.system:TensorRT",
    "cuda_graph": "systems.pytorch.cuda_graph:CudaGraph",
    "nimble": "systems.nimble.system:NimbleSystem",
    "ios": "systems.ios.system:Ios",
    "opara": "systems.opara.system:Opara",
}


def names() -> list[str]:
    return list(SYSTEMS)


def load(name: str, **options: Any) -> "System":
    """The system of this name with its options as in conf/system/<name>.yaml. Raises ValueError for a wrong name."""
    if name not in SYSTEMS:
        near = get_close_matches(name, SYSTEMS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(SYSTEMS)}"
        raise ValueError(f"no system is named {name}: {hint}")
    return getattr(module(name), SYSTEMS[name].partition(":")[2])(**options)


def module(name: str) -> ModuleType:
    """Where the system of this name is, imported. Raises ImportError."""
    return import_module(SYSTEMS[name].partition(":")[0])
