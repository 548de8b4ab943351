"""A module as an ONNX file, checked, compared with eager, and kept: what ONNX Runtime and TensorRT start from."""

import contextlib
import importlib.metadata
import importlib.util
import io
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import ConstantArgument
from torch.utils._pytree import tree_leaves

from systems.base import Unsupported
from systems.cache import Artefact, Cache, code_of
from systems.compilers.exported import Exported, first_line

from .session import BoundSession

MODEL = "model.onnx"  # its weights lie beside it, in as many files as the exporter likes
BFLOAT16_OPSET = 22  # the first in which convolution and pooling take bfloat16; elsewhere the exporter's own choice
NEEDED = ("onnx", "onnxscript", "onnxruntime")
# ||onnx - eager|| / ||eager|| that rounding alone may cause; a wrong operator gives errors near 1.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}


def unavailable() -> str | None:
    """Why nothing can be exported with this installation, or None."""
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        return f"{' and '.join(missing)} is not installed: pip install 'opweave[onnx]'"
    return None


@contextmanager
def onnx_file(exported: Exported, module: nn.Module, cache: Cache) -> Iterator[Artefact]:
    """Hold the ONNX file of `module`, MODEL in the artefact's folder, of which `exported` is the export.

    Its notes: `operators`, how many; `inputs` and `outputs`, their names; `error`, the largest relative error of an output
    against eager on the CPU provider, None with `not_compared` where that has no kernel for a dtype (as for bfloat16's
    convolutions). Kept by the content of the model, its inputs' shapes and the versions that export, this module's
    source among them. Raises Unsupported,
    naming the operator, where one has no counterpart in ONNX, and where the file is not valid or does not compute what the
    module does.
    """

    def make(folder: Path) -> dict[str, Any]:
        file = folder / MODEL
        _export(exported, file)
        return {**_check(file), **_compare(exported, module, file)}

    with cache.artefact("onnx", exported.label, _made_of(exported), make) as artefact:
        yield artefact


def relative_error(out: Tensor, reference: Tensor) -> float:
    """||out - reference|| / ||reference||, in double precision on the CPU."""
    out, reference = out.cpu().double(), reference.cpu().double()
    scale = reference.norm().item()
    return (out - reference).norm().item() / (scale if scale > 0 else 1.0)


def _made_of(exported: Exported) -> dict[str, Any]:
    versions = {name: importlib.metadata.version(name) for name in ("torch", "onnx", "onnxscript")}
    return {"model": exported.content, "versions": versions, "code": code_of(__name__)}


def _export(exported: Exported, file: Path) -> None:
    for spec in exported.program.graph_signature.output_specs:
        if isinstance(spec.arg, ConstantArgument) and spec.arg.value is not None:
            raise Unsupported(f"it returns {spec.arg.value!r}, and an ONNX file returns tensors alone")
    try:
        with torch.no_grad(), _quiet():
            bfloat16 = torch.bfloat16 in {x.dtype for x in exported.program.state_dict.values()}
            program = torch.onnx.export(
                exported.program,
                dynamo=True,
                opset_version=BFLOAT16_OPSET if bfloat16 else None,
                optimize=not bfloat16,  # it leaves weights with a folded batch norm in float32
                verbose=False,
            )
            assert program is not None
            program.save(file, external_data=True)
    except Exception as error:  # the exporter raises whatever its own passes do; what it refuses is told like the rest
        if operator := _refused(error):
            raise Unsupported(f"{operator} has no counterpart in ONNX") from error
        last = _origin(error)
        if isinstance(last, OSError):  # a full disk is no fault of the model's
            raise last from error
        raise Unsupported(f"it does not export to ONNX: {type(last).__name__}: {first_line(last)}") from error


def _refused(error: BaseException | None) -> str | None:
    """The operator that the exporter found no function for."""
    while error is not None:
        if found := re.search(r"No ONNX function found for <OpOverload\(op='([\w.]+)', overload='(\w+)'\)>", str(error)):
            return ".".join(found.groups())
        error = error.__cause__
    return None


def _origin(error: BaseException) -> BaseException:
    """What was raised first: the exporter's own error tells how to report it, and not what it is."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _check(file: Path) -> dict[str, Any]:
    """onnx.checker's verdict, with shape inference; what is in the file."""
    import onnx

    try:
        onnx.checker.check_model(str(file), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise Unsupported(f"its ONNX file is not valid: {first_line(error)}") from error
    graph = onnx.load(str(file), load_external_data=False).graph
    names = {"inputs": [value.name for value in graph.input], "outputs": [value.name for value in graph.output]}
    return {"operators": len(graph.node), **names}


def _compare(exported: Exported, module: nn.Module, file: Path) -> dict[str, Any]:
    """The largest relative error of ONNX Runtime's CPU provider against eager, without TF32, on the example inputs."""
    import onnxruntime
    from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as NoKernel

    try:
        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    except NoKernel as error:
        return {"error": None, "not_compared": first_line(error)}
    bound = BoundSession(session)
    got = [torch.empty(tuple(o.shape), dtype=o.dtype) for o in exported.outputs()]
    bound.bind([x.detach().cpu().contiguous() for x in exported.inputs], got)
    bound.run()
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        expected = [x for x in tree_leaves(module(*exported.inputs)) if isinstance(x, Tensor)]
    worst = max((relative_error(o, e) for o, e in zip(got, expected, strict=True)), default=0.0)
    tolerance = max((TOLERANCE.get(e.dtype, 0.0) for e in expected), default=0.0)
    if not worst <= tolerance:  # a NaN is no agreement either
        raise Unsupported(f"its ONNX file computes something else: relative error {worst:.1e} against eager")
    return {"error": worst}


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what the exporter prints and logs of its steps."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
