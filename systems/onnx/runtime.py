"""ONNX Runtime on its CPU or CUDA provider."""

import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import torch
from torch import Tensor, nn

from conf import not_one_of
from conf.text import first_line
from systems.base import BadOption, Compilation, Prepared, System, Unsupported
from systems.cache import Cache
from systems.compilers.compiled import Compiled, StaticBuffers, bytes_outside_torch, empty_outputs
from systems.compilers.exported import Exported
from systems.notice import Caution
from systems.preparing import lacks_memory

from .export import MODEL, OnnxNotes, onnx_file, unavailable
from .session import BoundSession

MODES = ("sequential", "parallel")
CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
GPU_PACKAGE = "'onnxruntime-gpu[cuda,cudnn]'"  # it brings libraries that torch may lack, cuRAND among them
WARM_UP_RUNS = 3  # the first chooses cuDNN's algorithms; one of the next captures a CUDA Graph


class OnnxRuntime(System):
    """ONNX Runtime, with as many threads as PyTorch has; in the parallel mode, as many between operators too.

    On CUDA its one switch for TF32 (use_tf32) is that of `Exported.allow_tf32`; layout=channels_last sets prefer_nhwc.

    Args:
        mode: One of MODES: `sequential`, one operator after the other, or `parallel`, the runtime's own inter-operator
            scheduler.
        cuda_graph: The CUDA provider's own option to capture a CUDA Graph.

    Raises:
        BadOption: An option has another value, or the two exclude each other.
    """

    name = "onnxruntime"

    def __init__(self, mode: str = "sequential", cuda_graph: bool = False):
        if wrong := not_one_of("system.mode", mode, MODES):
            raise BadOption(wrong)
        if cuda_graph and mode == "parallel":
            raise BadOption("system.mode=parallel runs operators on several threads, and a CUDA Graph is captured from one")
        self.mode, self.cuda_graph = mode, cuda_graph

    def unsupported(self, device: str) -> str | None:
        if reason := unavailable():
            return reason
        if self.cuda_graph and device != "cuda":
            return "a CUDA Graph needs a CUDA device"
        if device == "cuda" and CUDA not in _providers():
            return f"this ONNX Runtime has no CUDA provider: pip install {GPU_PACKAGE} in the place of onnxruntime"
        return None

    @property
    def learns(self) -> bool:
        """The file is exported and compared with eager, which takes memory and time in the process that does it."""
        return True

    def learn(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        with onnx_file(Exported(module, inputs), module, Cache()):
            pass

    def prepare(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> Prepared:
        exported = Exported(module, inputs)
        self.check_supported(inputs)
        bytes_before = bytes_outside_torch(exported.device)
        with onnx_file(exported, module, Cache()) as artefact:
            stream = torch.cuda.Stream(exported.device) if exported.device.type == "cuda" else None
            session = self._session(str(artefact.folder / MODEL), exported, stream)
            notes = OnnxNotes.of(artefact)
            compilation = Compilation(
                export_s=artefact.seconds,
                is_exported_now=artefact.is_new,
                operators=notes.operators,
                error=notes.error,
                not_compared=notes.not_compared,
                providers=_operators_by_provider(session, exported.device),
            )
        prepared = PreparedSession(session, exported, bytes_before, compilation, stream, self.cuda_graph, notes.in_place)
        with exported.restored():
            for _ in range(WARM_UP_RUNS):
                prepared(*inputs)
        return prepared

    def _session(self, file: str, exported: Exported, stream: "torch.cuda.Stream | None") -> Any:
        import onnxruntime
        from onnxruntime.capi import onnxruntime_pybind11_state as raised

        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
        parallel = self.mode == "parallel"
        mode = onnxruntime.ExecutionMode
        options.execution_mode = mode.ORT_PARALLEL if parallel else mode.ORT_SEQUENTIAL
        options.intra_op_num_threads = torch.get_num_threads()
        options.inter_op_num_threads = torch.get_num_threads() if parallel else 1
        if parallel:  # the two pools share the cores: a thread that spins for work takes its core from the other pool
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        options.log_severity_level = 3  # errors
        provider = CPU if stream is None else CUDA
        providers: list[Any] = [CPU] if stream is None else [(CUDA, self._cuda_options(exported, stream)), CPU]
        with redirect_stdout(StringIO()) as printed:
            if stream is not None and hasattr(onnxruntime, "preload_dlls"):
                onnxruntime.preload_dlls()  # CUDA and cuDNN as torch brought them
        try:
            session = onnxruntime.InferenceSession(file, options, providers=providers)
        except (raised.NotImplemented, raised.InvalidGraph, raised.Fail) as error:  # it has no kernel, or cannot capture
            if lacks_memory(error):
                raise
            raise Unsupported(f"ONNX Runtime cannot load it: {first_line(error)}") from error
        if provider not in session.get_providers():  # ONNX Runtime goes on without a provider that does not load
            why = first_line(printed.getvalue()) or "it wants CUDA or cuDNN of another version"
            raise Unsupported(f"ONNX Runtime's {provider} does not load here ({why}): pip install {GPU_PACKAGE}")
        return session

    def _cuda_options(self, exported: Exported, stream: "torch.cuda.Stream") -> dict[str, str]:
        return {
            "device_id": str(exported.device.index or 0),
            "user_compute_stream": str(stream.cuda_stream),
            "cudnn_conv_algo_search": "EXHAUSTIVE",
            "use_tf32": str(int(exported.allow_tf32)),
            "prefer_nhwc": str(int(exported.channels_last)),
            "enable_cuda_graph": str(int(self.cuda_graph)),
        }


class PreparedSession(Compiled):
    """A session that runs on a stream of its own.

    Args:
        stream: The session's, on a GPU. The provider takes one for good, and the default stream cannot be captured. It waits
            for torch's current stream before a run, and torch's for it afterwards.
        is_captured: The session captures itself, and so is bound to its buffers once.
        in_place: As `OnnxNotes.in_place`. A written buffer that is contiguous is an output itself where this allows it.
    """

    def __init__(
        self,
        session: Any,
        exported: Exported,
        bytes_before: int,
        compilation: Compilation,
        stream: "torch.cuda.Stream | None",
        is_captured: bool,
        in_place: frozenset[tuple[int, int]] = frozenset(),
    ):
        super().__init__(exported, bytes_before, compilation)
        self.stream, self.is_captured = stream, is_captured
        buffers = {id(buffer): i for i, buffer in enumerate(exported.arguments)}
        begin = len(exported.outputs()) - len(exported.written)
        self.own_outputs = {
            i: buffer
            for i, buffer in enumerate(exported.written, begin)
            if (i, buffers[id(buffer)]) in in_place and buffer.is_contiguous()
        }
        options = None
        if stream is not None:
            import onnxruntime

            options = onnxruntime.RunOptions()
            options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        self.bound: BoundSession | None = BoundSession(session, options)
        self.buffers = StaticBuffers(exported, self._outputs()) if is_captured else None
        if self.buffers is not None:
            self.bound.bind(self.buffers.inputs, self.buffers.outputs)

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        if self.bound is None:
            raise RuntimeError("this executor is closed")
        if self.buffers is not None:
            self.buffers.fill(inputs)
            self._launch(self.bound)
            return self.buffers.copied_outputs()
        outputs = self._outputs()
        self.bound.bind(inputs, outputs)
        self._launch(self.bound)
        return outputs

    def _outputs(self) -> list[Tensor]:
        return [self.own_outputs.get(i, output) for i, output in enumerate(empty_outputs(self.exported))]

    def _launch(self, bound: BoundSession) -> None:
        if self.stream is None:
            bound.run()
            return
        current = torch.cuda.current_stream(self.exported.device)
        self.stream.wait_stream(current)
        bound.run()
        current.wait_stream(self.stream)

    def close(self) -> None:
        self.bound = self.buffers = None


def _operators_by_provider(session: Any, device: torch.device) -> dict[str, int] | None:
    """How many operators each provider runs, before it fuses any; None if this ONNX Runtime is too old to say.

    On CUDA a Caution names the operators that the CPU runs.
    """
    if not hasattr(session, "get_provider_graph_assignment_info"):
        return None
    types: dict[str, Counter[str]] = {}
    for part in session.get_provider_graph_assignment_info():
        types.setdefault(part.ep_name, Counter()).update(node.op_type for node in part.get_nodes())
    operators = {provider: counts.total() for provider, counts in types.items()}
    if device.type == "cuda" and CPU in types:
        which = ", ".join(f"{count} {operator}" for operator, count in types[CPU].most_common())
        message = f"ONNX Runtime has put {operators[CPU]} of {sum(operators.values())} operators on the CPU: {which}"
        warnings.warn(message, category=Caution, stacklevel=3)
    return operators


def _providers() -> list[str]:
    import onnxruntime

    providers: list[str] = onnxruntime.get_available_providers()
    return providers
