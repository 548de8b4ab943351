"""A module as an ONNX file, checked and compared with eager: ONNX Runtime and TensorRT start from it."""

import contextlib
import importlib.metadata
import importlib.util
import io
import logging
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import ConstantArgument
from torch.utils._pytree import tree_leaves

from conf.text import first_line
from systems.arithmetic import without_tf32
from systems.base import Unsupported
from systems.cache import JSON, Artefact, Cache, code_of
from systems.compilers.exported import Exported

from .session import BoundSession

aten = torch.ops.aten
BAGS = aten.embedding_bag.padding_idx
BAGS_DEFAULTS = False, 0, False, None, False, None  # the last three: weights, whether the last one's end is told, padding
MODEL = "model.onnx"  # its weights lie beside it, in as many files as the exporter likes
BFLOAT16_OPSET = 22  # the first in which convolution and pooling take bfloat16; other models have the exporter's choice
SCATTERS = ("ScatterElements", "ScatterND")  # they copy their first input, unless the output lies there
NEEDED = ("onnx", "onnxscript", "onnxruntime")
# ||onnx - eager|| / ||eager|| that rounding alone may cause; a wrong operator gives errors near 1.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}


@dataclass(frozen=True)
class OnnxNotes:
    """What the cache knows of an ONNX file.

    Args:
        operators: How many it has.
        inputs, outputs: Their names, in the order of the exported program.
        error: The largest relative error of an output against eager, on the CPU provider; None where it has no kernel for a
            dtype, as for bfloat16's convolutions.
        not_compared: Why there is no error.
        in_place: Outputs that may be written where an input lies, by the place of each among outputs and inputs: a scatter
            makes the output of the input, and nothing else reads that.
    """

    operators: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    error: float | None = None
    not_compared: str | None = None
    in_place: frozenset[tuple[int, int]] = frozenset()

    @classmethod
    def of(cls, artefact: Artefact) -> "OnnxNotes":
        """The notes of an artefact that `onnx_file` made, or of one whose maker passed them on."""
        notes = artefact.notes
        operators, inputs, outputs, error, why, in_place = (
            notes.get(key) for key in ("operators", "inputs", "outputs", "error", "not_compared", "in_place")
        )
        assert isinstance(operators, int) and isinstance(inputs, list) and isinstance(outputs, list)
        assert isinstance(in_place, list)
        return cls(
            operators,
            tuple(map(str, inputs)),
            tuple(map(str, outputs)),
            error if isinstance(error, int | float) else None,
            None if why is None else str(why),
            frozenset((output, x) for output, x in cast("list[tuple[int, int]]", in_place)),
        )


def unavailable() -> str | None:
    """Why nothing can be exported with this installation, or None."""
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        return f"{' and '.join(missing)} is not installed: pip install 'opweave[onnx]'"
    return None


@contextmanager
def onnx_file(exported: Exported, module: nn.Module, cache: Cache) -> Iterator[Artefact]:
    """Hold the ONNX file of `module`: MODEL in the artefact's folder, with `OnnxNotes`.

    The cache knows it by the content of the model, its inputs' shapes, and the versions of all that exports, this module's
    source among them.

    Args:
        exported: The export of `module`.

    Raises:
        Unsupported: An operator, which is named, has no counterpart in ONNX; or the file is not valid, or does not compute
            what the module does.
    """

    def make(folder: Path) -> dict[str, JSON]:
        file = folder / MODEL
        _export(exported, file)
        return {**_check(file), **_compare(exported, module, file)}

    with cache.artefact("onnx", exported.label, _ingredients(exported), make) as artefact:
        yield artefact


def relative_error(out: Tensor, reference: Tensor) -> float:
    """||out - reference|| / ||reference||, in double precision on the CPU."""
    out, reference = out.cpu().double(), reference.cpu().double()
    scale = reference.norm().item()
    return (out - reference).norm().item() / (scale if scale > 0 else 1.0)


def _ingredients(exported: Exported) -> dict[str, JSON]:
    versions: dict[str, JSON] = {name: importlib.metadata.version(name) for name in ("torch", "onnx", "onnxscript")}
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
                custom_translation_table=_translations(exported.program.graph),
                verbose=False,
            )
            assert program is not None
            _lay_out(program.model.graph)
            program.save(file, external_data=True)
    except Exception as error:  # the exporter raises whatever its own passes do, also for an operator that it lacks
        if operator := _refused(error):
            raise Unsupported(f"{operator} has no counterpart in ONNX") from error
        last = _origin(error)
        if isinstance(last, OSError):  # a full disk is no fault of the model's
            raise last from error
        raise Unsupported(f"it does not export to ONNX: {type(last).__name__}: {first_line(last)}") from error


def _lay_out(graph: Any) -> None:
    """Copy each transposed weight of an onnx_ir.Graph in its order: NumPy writes a strided array item by item, 20 s a GB."""
    import numpy
    import onnx_ir

    for value in graph.initializers.values():
        weight = value.const_value
        array = weight.raw if isinstance(weight, onnx_ir.Tensor) else None
        if isinstance(array, numpy.ndarray) and not array.flags.c_contiguous:
            bits = torch.from_numpy(array.view(f"i{array.itemsize}")).contiguous()  # faster than NumPy's copy
            array = bits.numpy().view(array.dtype)
            value.const_value = onnx_ir.Tensor(array, weight.dtype, shape=weight.shape, name=weight.name)


def _translations(graph: fx.Graph) -> dict[Callable[..., Any], Callable[..., Any]]:
    """Those that take the place of the exporter's own. Its bags of embeddings are loops, which no CUDA Graph holds."""
    ours: dict[Callable[..., Any], Callable[..., Any]] = {aten.index_copy.default: _index_copy}
    if all(map(_is_even, graph.find_nodes(op="call_function", target=BAGS))):
        ours[BAGS] = _even_bags
    return ours


def _is_even(node: fx.Node) -> bool:
    """Are these bags of equally many rows, unweighted, of which nothing but what they come to is read?"""
    arguments: tuple[Any, ...] = node.args + BAGS_DEFAULTS[len(node.args) - 3 :]
    _, rows, beginnings, _, _, _, *others = arguments
    if getattr(beginnings, "target", None) is not aten.arange.start_step:
        return False
    numbers: tuple[Any, ...] = (*beginnings.args, 1)
    first, end, step = numbers[:3]
    is_read = {user.args[1] for user in node.users if user.users}
    are_all = (first, end) == (0, rows.meta["val"].numel()) and end % step == 0
    return are_all and others == [None, False, None] and is_read <= {0}


def _even_bags(
    table: Any, rows: Any, beginnings: Any, _scale: bool = False, mode: int = 0, *_: Any, **__: Any
) -> tuple[Any, Any, Any, Any]:
    """Bags of equally many rows, by their sums, means or maxima. What else the operator returns is not read."""
    from onnxscript import opset18 as op

    vectors = op.Gather(table, rows)
    if rows.shape[0] != beginnings.shape[0]:
        sizes = [beginnings.shape[0], rows.shape[0] // beginnings.shape[0], table.shape[1]]
        reduce = (op.ReduceSum, op.ReduceMean, op.ReduceMax)[mode]
        vectors = reduce(op.Reshape(vectors, op.Constant(value_ints=sizes)), op.Constant(value_ints=[1]), keepdims=0)
    return vectors, beginnings, beginnings, beginnings


def _index_copy(x: Any, dim: int, index: Any, source: Any) -> Any:
    """One scatter. The exporter's own translation transposes the whole of x before and after."""
    from onnxscript import opset18 as op

    sizes = [1] * len(x.shape)
    sizes[dim] = -1
    places = op.Expand(op.Reshape(index, op.Constant(value_ints=sizes)), op.Shape(source))
    return op.ScatterElements(x, places, source, axis=dim)


def _refused(error: BaseException | None) -> str | None:
    """The operator that the exporter has no function for; None if the error is another."""
    while error is not None:
        if match := re.search(r"No ONNX function found for <OpOverload\(op='([\w.]+)', overload='(\w+)'\)>", str(error)):
            return ".".join(match.groups())
        error = error.__cause__
    return None


def _origin(error: BaseException) -> BaseException:
    """The error that was raised first: the exporter's own error says how to report it, not what it is."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _check(file: Path) -> dict[str, JSON]:
    """Have onnx.checker judge the file, with shape inference; returns the notes on its content."""
    import onnx

    try:
        onnx.checker.check_model(str(file), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise Unsupported(f"its ONNX file is not valid: {first_line(error)}") from error
    graph = onnx.load(str(file), load_external_data=False).graph
    return {
        "operators": len(graph.node),
        "inputs": [value.name for value in graph.input],
        "outputs": [value.name for value in graph.output],
        "in_place": _in_place(graph),
    }


def _in_place(graph: Any) -> list[JSON]:
    """As `OnnxNotes.in_place`, of an onnx.GraphProto."""
    readers = Counter(name for node in graph.node for name in node.input)
    readers.update(value.name for value in graph.output)
    inputs = {value.name: i for i, value in enumerate(graph.input)}
    scattered = {n.output[0]: n.input[0] for n in graph.node if n.op_type in SCATTERS}
    sources = [(i, scattered.get(value.name)) for i, value in enumerate(graph.output)]
    return [[i, inputs[source]] for i, source in sources if source in inputs and readers[source] == 1]


def _compare(exported: Exported, module: nn.Module, file: Path) -> dict[str, JSON]:
    """The largest relative error of ONNX Runtime's CPU provider against eager, without TF32, on the example inputs."""
    import onnxruntime
    from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as NoKernel

    try:
        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    except NoKernel as error:
        return {"error": None, "not_compared": first_line(error)}
    bound = BoundSession(session)
    outputs = [torch.empty(tuple(o.shape), dtype=o.dtype) for o in exported.outputs()]
    bound.bind([x.detach().cpu().contiguous() for x in exported.arguments], outputs)
    bound.run()
    with torch.no_grad(), without_tf32(), exported.restored():
        expected = [x for x in tree_leaves(module(*exported.inputs)) if isinstance(x, Tensor)]
        expected = [x.clone() for x in (*expected, *exported.written)]
    worst = max((relative_error(o, e) for o, e in zip(outputs, expected, strict=True)), default=0.0)
    tolerance = max((TOLERANCE.get(e.dtype, 0.0) for e in expected), default=0.0)
    if not worst <= tolerance:  # a NaN is no agreement either
        raise Unsupported(f"its ONNX file computes something else: relative error {worst:.1e} against eager")
    return {"error": worst}


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's prints and logs within."""
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
