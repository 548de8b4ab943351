"""TensorRT, through its Python API of versions 10 and 11. Its engines have not been run in this project's own tests."""

import copy
import importlib.metadata
import importlib.util
import os
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from conf import not_one_of
from systems.base import BadOption, Compilation, Prepared, System, Unsupported
from systems.cache import JSON, Artefact, Cache, code_of
from systems.compilers.compiled import Captured, Compiled, bytes_outside_torch, empty_outputs
from systems.compilers.exported import Exported
from systems.notice import Caution, Notice
from systems.onnx.export import MODEL, OnnxNotes, onnx_file
from systems.onnx.export import unavailable as onnx_unavailable

if TYPE_CHECKING:
    import tensorrt as trt

ENGINE, TIMINGS = "engine.plan", "timing.cache"
LEVELS = range(6)
OLDEST = 10
NOT_INSTALLED = (
    "TensorRT is not installed, and PyPI does not hold its libraries: pip install 'opweave[onnx,tensorrt]' fetches them "
    "from NVIDIA's index, and so does the Docker image built with --build-arg EXTRAS='onnx tensorrt'"
)
CAUTION = "the adapter of TensorRT has not been run in this project's own tests"
LEARNED_IN_PLACE = "learned in place: the cache lacked TensorRT's engine, for which this process has timed kernels"
# Names of tensorrt.DataType.
DTYPES = {
    "FLOAT": torch.float32,
    "HALF": torch.float16,
    "BF16": torch.bfloat16,
    "INT8": torch.int8,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "UINT8": torch.uint8,
    "BOOL": torch.bool,
}


class TensorRT(System):
    """TensorRT, by way of an ONNX file.

    Networks are strongly typed: each tensor has the dtype that it has in the ONNX file. That is an option of version 10 and
    the only way in version 11, which has no FP16 flag. TF32 is allowed where `Exported.allow_tf32` is true.

    Args:
        fp16: Compute in float16, whatever the model arrives in; inputs and outputs keep their dtypes.
        cuda_graph: Capture the engine's execution into one CUDA Graph.
        optimization_level: The builder's, 0 to 5; 5 searches longest.

    Raises:
        BadOption: There is no such level.
    """

    name = "tensorrt"

    def __init__(self, fp16: bool = False, cuda_graph: bool = False, optimization_level: int = 3):
        if wrong := not_one_of("system.optimization_level", optimization_level, LEVELS):
            raise BadOption(wrong)
        self.fp16, self.cuda_graph, self.optimization_level = fp16, cuda_graph, optimization_level

    def unsupported(self, device: str) -> str | None:
        if not installed():
            return NOT_INSTALLED
        if int(version().split(".")[0]) < OLDEST:
            return f"TensorRT {version()} is too old: it needs version {OLDEST} or newer"
        return onnx_unavailable() or (None if device == "cuda" else "TensorRT needs a CUDA device")

    @property
    def learns(self) -> bool:
        """The builder chooses kernels by timing them."""
        return True

    def learn(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        with self._engine(*self._exported(module, inputs)):
            pass

    def prepare(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> Prepared:
        warnings.warn(CAUTION, category=Caution, stacklevel=2)
        module, exported = self._exported(module, inputs)
        bytes_before = bytes_outside_torch(exported.device)
        with self._engine(module, exported) as artefact:
            plan = (artefact.folder / ENGINE).read_bytes()
        if artefact.is_new:
            warnings.warn(LEARNED_IN_PLACE, category=Notice, stacklevel=2)
        notes = OnnxNotes.of(artefact)
        compilation = Compilation(
            compile_s=artefact.seconds,
            is_compiled_now=artefact.is_new,
            operators=notes.operators,
            error=notes.error,
            not_compared=notes.not_compared,
        )
        bound = bindings(exported, notes.inputs, notes.outputs)
        prepared = PreparedEngine(plan, bound, exported, bytes_before, compilation)
        with exported.restored():
            prepared(*inputs)  # the first execution sets up what a capture must not
        return Captured(prepared) if self.cuda_graph else prepared

    def _exported(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[nn.Module, Exported]:
        """The module in the engine's precision, and its export."""
        if not self.fp16:
            return module, Exported(module, inputs)
        exported = Exported(halved := InHalf(module), inputs)
        if exported.written:
            raise Unsupported("system.fp16=true computes in a copy, and it changes its own state: take precision=fp16")
        return halved, exported

    def _engine(self, module: nn.Module, exported: Exported) -> AbstractContextManager[Artefact]:
        """Hold the engine of `module`, ENGINE in the artefact's folder, with the notes of its ONNX file."""
        cache = Cache()

        def make(folder: Path) -> Mapping[str, JSON]:
            with onnx_file(exported, module, cache) as onnx:
                plan = self._build(str(onnx.folder / MODEL), exported.allow_tf32, timing_of(exported.device), cache)
                (folder / ENGINE).write_bytes(plan)
                return onnx.notes

        return cache.artefact("tensorrt", exported.label, engine_of(exported, self.optimization_level), make)

    def _build(self, onnx: str, tf32: bool, timing: dict[str, JSON], cache: Cache) -> bytes:
        """Build the engine of an ONNX file, with the timings of earlier builds on the same kind of GPU.

        Args:
            onnx: The file.
            tf32: Kernels may compute in TF32.
            timing: What decides the timings, of `timing_of`.

        Returns:
            The engine, serialised.

        Raises:
            Unsupported: The parser refuses an operator, which is named.
            RuntimeError: No engine comes out.
        """
        import tensorrt as trt

        logger = log()
        builder = trt.Builder(logger)
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        parser = trt.OnnxParser(network, logger)
        if not parser.parse_from_file(onnx):
            errors = [parser.get_error(i) for i in range(parser.num_errors)]
            refused = "; ".join(f"{e.node_operator() or 'the file'}: {e.desc()}" for e in errors)
            raise Unsupported(f"TensorRT cannot parse {refused}")
        config = builder.create_builder_config()
        config.builder_optimization_level = self.optimization_level
        (config.set_flag if tf32 else config.clear_flag)(trt.BuilderFlag.TF32)
        label = str(timing["gpu"])
        with cache.workspace("tensorrt-timing", label, timing) as folder:
            timings = config.create_timing_cache(_read(folder / TIMINGS))  # it has to live until the engine is built
        config.set_timing_cache(timings, ignore_mismatch=False)
        plan = builder.build_serialized_network(network, config)
        if plan is None:
            raise RuntimeError(f"TensorRT built no engine: {logger.last}")
        with cache.workspace("tensorrt-timing", label, timing) as folder:
            timings.combine(config.create_timing_cache(_read(folder / TIMINGS)), ignore_mismatch=False)
            partial = folder / f"{TIMINGS}.partial"
            partial.write_bytes(bytes(memoryview(timings.serialize())))
            os.replace(partial, folder / TIMINGS)
        return bytes(memoryview(plan))


@dataclass(frozen=True)
class Binding:
    """One input or output of an engine.

    Args:
        index: Among the exported program's inputs, or among its outputs.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    index: int
    is_output: bool


class PreparedEngine(Compiled):
    """An engine in TensorRT's runtime.

    Args:
        plan: The engine, serialised.
        bindings: The inputs and outputs that it has to have.

    Raises:
        RuntimeError: The engine does not load, or has other inputs and outputs.
    """

    def __init__(
        self,
        plan: bytes,
        bindings: Sequence[Binding],
        exported: Exported,
        bytes_before: int,
        compilation: Compilation,
    ):
        super().__init__(exported, bytes_before, compilation)
        import tensorrt as trt

        self.logger = log()
        self.runtime = trt.Runtime(self.logger)
        engine = self.runtime.deserialize_cuda_engine(plan)
        if engine is None:
            raise RuntimeError(f"TensorRT cannot load its engine: {self.logger.last}")
        names = {engine.get_tensor_name(i) for i in range(engine.num_io_tensors)}
        if names != {binding.name for binding in bindings}:
            raise RuntimeError(f"the engine has the inputs and outputs {sorted(names)}")
        for binding in bindings:
            shape, dtype = engine.get_tensor_shape(binding.name)[:], engine.get_tensor_dtype(binding.name).name
            is_output = engine.get_tensor_mode(binding.name) == trt.TensorIOMode.OUTPUT
            if (shape, DTYPES.get(str(dtype)), is_output) != (binding.shape, binding.dtype, binding.is_output):
                raise RuntimeError(f"{binding.name} of the engine is {dtype}{list(shape)}, not {binding}")
        self.engine: trt.ICudaEngine | None = engine
        self.context: trt.IExecutionContext | None = engine.create_execution_context()
        self.bindings = bindings
        # On the default stream TensorRT synchronises in each execution.
        self.stream = torch.cuda.Stream(exported.device)

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        if self.context is None:
            raise RuntimeError("this executor is closed")
        outputs = empty_outputs(self.exported)
        for binding in self.bindings:
            tensor = (outputs if binding.is_output else inputs)[binding.index]
            self.context.set_tensor_address(binding.name, tensor.data_ptr())
        current = torch.cuda.current_stream(self.exported.device)
        stream = current if current.cuda_stream else self.stream
        if stream is not current:
            stream.wait_stream(current)
        if not self.context.execute_async_v3(stream.cuda_stream):
            raise RuntimeError(f"TensorRT did not execute: {self.logger.last}")
        if stream is not current:
            current.wait_stream(stream)
        return outputs

    def close(self) -> None:
        self.context = self.engine = None


class InHalf(nn.Module):
    """A copy of `module` in float16 that takes and returns tensors of the dtypes that `module` takes and returns."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
        self.module = copy.deepcopy(module).half().eval()

    def forward(self, *inputs: Tensor) -> Any:
        halved = [x.half() if x.is_floating_point() else x for x in inputs]
        return tree_map_only(Tensor, self._widened, self.module(*halved))

    def _widened(self, x: Tensor) -> Tensor:
        return x.to(self.dtype) if x.is_floating_point() else x


def bindings(exported: Exported, inputs: Sequence[str], outputs: Sequence[str]) -> list[Binding]:
    """The inputs and outputs that the engine of an ONNX file with these names has to have, in their order."""
    taken = [(name, x, i, False) for i, (name, x) in enumerate(zip(inputs, exported.arguments, strict=True))]
    returned = [(name, o, i, True) for i, (name, o) in enumerate(zip(outputs, exported.outputs(), strict=True))]
    return [Binding(name, tuple(x.shape), x.dtype, index, output) for name, x, index, output in (*taken, *returned)]


def engine_of(exported: Exported, optimization_level: int) -> dict[str, JSON]:
    """All that decides an engine: the model with its batch and dtypes, the arithmetic allowed, and where it was built."""
    settings: dict[str, JSON] = {"tf32": exported.allow_tf32, "optimization_level": optimization_level}
    code = code_of(__name__, onnx_file.__module__)
    return {"model": exported.content, "code": code, **settings, **timing_of(exported.device)}


def timing_of(device: torch.device) -> dict[str, JSON]:
    """All that decides the timings of kernels: the GPU and the libraries."""
    properties = torch.cuda.get_device_properties(device)
    gpu = f"{properties.name}, {properties.multi_processor_count} SMs, {properties.major}.{properties.minor}"
    return {"gpu": gpu, "tensorrt": version(), "cuda": torch.version.cuda}


def installed() -> bool:
    """Is TensorRT here? A folder of type stubs alone has no file to import."""
    spec = importlib.util.find_spec("tensorrt")
    return spec is not None and spec.origin is not None


def version() -> str:
    for name in ("tensorrt", "tensorrt_cu13", "tensorrt_cu12"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    import tensorrt as trt

    return trt.__version__


def log() -> Any:
    """A logger that holds TensorRT's last error in `last`."""
    import tensorrt as trt

    class Log(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.last = "its log says nothing"

        def log(self, severity: "trt.ILogger.Severity", msg: str) -> None:
            if severity in (trt.ILogger.Severity.INTERNAL_ERROR, trt.ILogger.Severity.ERROR):
                self.last = msg.strip()

    return Log()


def _read(file: Path) -> bytes:
    return file.read_bytes() if file.exists() else b""
