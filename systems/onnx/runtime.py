"""ONNX Runtime on its CPU or CUDA provider."""

import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import torch
from torch import Tensor, nn

from systems.base import BadOption, Prepared, System, Unsupported
from systems.cache import Cache
from systems.compilers.compiled import Compiled, StaticBuffers, empty_outputs, held_outside_torch
from systems.compilers.exported import Exported, first_line
from systems.notice import Notice

from .export import MODEL, onnx_file, unavailable
from .session import BoundSession

MODES = ("sequential", "parallel")
CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
GPU_PACKAGE = "'onnxruntime-gpu[cuda,cudnn]'"  # with libraries that torch need not have, cuRAND among them
WARM_UP_RUNS = 3  # cuDNN's algorithms are chosen in the first; a CUDA Graph is captured in one of the next


class OnnxRuntime(System):
    """mode: operators one after the other, or the runtime's own inter-operator scheduler, one of MODES. cuda_graph: the CUDA
    provider's own option for it. As many threads as PyTorch has, between operators too in the parallel mode.

    On CUDA its one switch for TF32 (use_tf32) is as `Exported.allow_tf32` says; layout=channels_last asks for prefer_nhwc.
    """

    name = "onnxruntime"

    def __init__(self, mode: str = "sequential", cuda_graph: bool = False):
        if mode not in MODES:
            raise BadOption(f"system.mode is {mode}, not one of {', '.join(MODES)}")
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

    def prepare(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> Prepared:
        exported = Exported(module, inputs)
        held = held_outside_torch(exported.device)
        with onnx_file(exported, module, Cache()) as artefact:
            stream = torch.cuda.Stream(exported.device) if exported.device.type == "cuda" else None
            session = self._session(str(artefact.folder / MODEL), exported, stream)
            compilation = {"export_s": artefact.seconds, "exported_now": artefact.made, **artefact.notes}
            compilation |= _assigned(session, exported.device)
        prepared = PreparedSession(session, exported, held, compilation, stream, self.cuda_graph)
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
        if parallel:  # a thread of one pool that spins for work would take its core from the other pool, which is as large
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        options.log_severity_level = 3  # errors
        provider = CPU if stream is None else CUDA
        providers: list[Any] = [CPU] if stream is None else [(CUDA, self._cuda_options(exported, stream)), CPU]
        with redirect_stdout(StringIO()) as told:
            if stream is not None and hasattr(onnxruntime, "preload_dlls"):
                onnxruntime.preload_dlls()  # CUDA and cuDNN as torch brought them
        try:
            session = onnxruntime.InferenceSession(file, options, providers=providers)
        except (raised.NotImplemented, raised.InvalidGraph, raised.Fail) as error:  # it has no kernel, or cannot capture
            raise Unsupported(f"ONNX Runtime cannot load it: {first_line(error)}") from error
        if provider not in session.get_providers():  # it goes on without one that does not load
            why = (told.getvalue().splitlines() or ["it wants CUDA or cuDNN of another version"])[0]
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
    """stream: the session's own, since the provider takes one for good, and the default stream cannot be captured; it waits
    for torch's current stream, and that for it. captured: the session captures itself, and so is bound once.
    """

    def __init__(
        self,
        session: Any,
        exported: Exported,
        held: int,
        compilation: dict[str, Any],
        stream: "torch.cuda.Stream | None",
        captured: bool,
    ):
        super().__init__(exported, held, compilation)
        self.stream, self.captured = stream, captured
        options = None
        if stream is not None:
            import onnxruntime

            options = onnxruntime.RunOptions()
            options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        self.bound: BoundSession | None = BoundSession(session, options)
        self.buffers = StaticBuffers(exported) if captured else None
        if self.buffers is not None:
            self.bound.bind(self.buffers.inputs, self.buffers.outputs)

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        if self.bound is None:
            raise RuntimeError("this executor is closed")
        if self.buffers is not None:
            self.buffers.fill(inputs)
            self._launch(self.bound)
            return self.buffers.taken()
        outputs = empty_outputs(self.exported)
        self.bound.bind(inputs, outputs)
        self._launch(self.bound)
        return outputs

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


def _assigned(session: Any, device: torch.device) -> dict[str, Any]:
    """providers: how many operators each was given, before it fuses any. On CUDA a Notice says which the CPU was given.
    Empty where this ONNX Runtime is too old to tell.
    """
    if not hasattr(session, "get_provider_graph_assignment_info"):
        return {}
    types: dict[str, Counter[str]] = {}
    for part in session.get_provider_graph_assignment_info():
        types.setdefault(part.ep_name, Counter()).update(node.op_type for node in part.get_nodes())
    providers = {name: found.total() for name, found in types.items()}
    if device.type == "cuda" and CPU in types:
        which = ", ".join(f"{count} {operator}" for operator, count in types[CPU].most_common())
        told = f"ONNX Runtime has put {providers[CPU]} of {sum(providers.values())} operators on the CPU: {which}"
        warnings.warn(told, category=Notice, stacklevel=3)
    return {"providers": providers}


def _providers() -> list[str]:
    import onnxruntime

    providers: list[str] = onnxruntime.get_available_providers()
    return providers
