"""From an exported module to a TVM library: import into Relax, fuse, schedule, build."""

import importlib.util
import inspect
import logging
import os
import platform
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.export import ExportedProgram, default_decompositions
from torch.export.passes import move_to_device_pass
from torch.nn.attention import SDPBackend, sdpa_kernel

from conf.text import first_line
from systems.base import Unsupported
from systems.cache import JSON
from systems.compilers.exported import Exported

LIBRARY = "library.so"
LOGGER = "tvm.s_tir.meta_schedule"
SEED = 1
ATTEMPTS = 4  # samples of a function's schedule space; the first valid one is used
SCHEDULED = "tirx.is_scheduled"
HEADER = "cuda_runtime.h"
TARGET = f"targets/{platform.machine()}-linux"  # of a CUDA toolkit


def target_for(device: torch.device) -> Any:
    """The tvm.target.Target of a GPU, or of this machine's CPU with as many cores as PyTorch has threads."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return cuda_target(f"sm_{properties.major}{properties.minor}", properties.shared_memory_per_block)
    from tvm.target import Target, codegen

    return Target({"kind": "llvm", "mcpu": codegen.llvm_get_system_cpu(), "num-cores": torch.get_num_threads()})


def cuda_target(arch: str, shared_memory: int = 48 * 1024) -> Any:
    """The target of a GPU, which need not be here.

    Args:
        arch: Its architecture, as in "sm_90".
        shared_memory: Bytes a block; the other limits are the same for every GPU.
    """
    from tvm.target import Target

    limits = {"max_threads_per_block": 1024, "thread_warp_size": 32, "registers_per_block": 65536}
    return Target({"kind": "cuda", "arch": arch, "max_shared_memory_per_block": shared_memory, **limits}, host="llvm")


def lowered(exported: Exported, target: Any) -> Any:
    """The module as a tvm.IRModule of fused functions without schedules, weights bound: tuning starts from it.

    In layout=channels_last, convolutions are converted to NHWC.

    Raises:
        Unsupported: The importer lacks an operator, which is named, or refuses the module.
    """
    import tvm
    from tvm import relax
    from tvm.relax.frontend.torch import from_exported_program

    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            options = {"keep_params_as_input": False, "custom_convert_map": _converters(exported)}
            module = from_exported_program(_decomposed(exported), run_ep_decomposition=False, **options)
    except Exception as error:  # the importer raises whatever its converters do
        if match := re.search(r"Unsupported function types? (\[.*\])", str(error)):
            lacking = sorted(re.findall(r"[\w.]+", match[1]))
            raise Unsupported(f"TVM's importer lacks {', '.join(lacking)}") from error
        raise Unsupported(f"TVM's importer refuses it: {type(error).__name__}: {first_line(error)}") from error
    passes = [relax.transform.DecomposeOpsForInference(), relax.transform.CanonicalizeBindings()]
    if exported.channels_last:
        passes.append(relax.transform.ConvertLayout({"relax.nn.conv2d": ["NHWC", "OHWI"]}))
    with target:
        return tvm.transform.Sequential([*passes, relax.get_pipeline("zero")])(module)


def _decomposed(exported: Exported) -> ExportedProgram:
    """The program in ATen's core operators, moved to the host, its weights contiguous.

    Attention is decomposed, since PyTorch's own operator for it on a GPU is not in the core. The program moves to the host
    because weights become constants: TVM folds them by running code there, and its virtual machine moves them to the device.
    """
    decompositions = default_decompositions()
    decompositions[torch.ops.aten.index_copy.default] = _index_copy
    with sdpa_kernel(SDPBackend.MATH):
        program = exported.program.run_decompositions(decompositions)
    program._state_dict, program._constants = dict(program.state_dict), dict(program.constants)  # copies of the export's
    program = move_to_device_pass(program, "cpu")
    # The importer takes a tensor of other strides through NumPy, which has no bfloat16.
    program._state_dict = {name: _contiguous(x) for name, x in program.state_dict.items()}
    program._constants = {k: _contiguous(x) if isinstance(x, torch.Tensor) else x for k, x in program.constants.items()}
    return program


def _index_copy(x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """A choice for each place along `dim`. PyTorch makes an index_put over one of several dimensions, which TVM lacks."""
    is_written = torch.arange(x.shape[dim], device=x.device)[:, None] == index  # [places, indices]
    last = index.shape[0] - 1 - is_written.flip(1).int().argmax(1)  # of several for one place
    values = source.index_select(dim, last)
    shape = [1] * x.dim()
    shape[dim] = -1
    return torch.where(is_written.any(1).view(shape), values, x)


def _contiguous(weight: torch.Tensor) -> torch.Tensor:
    laid_out = weight.detach().contiguous()
    return torch.nn.Parameter(laid_out, weight.requires_grad) if isinstance(weight, torch.nn.Parameter) else laid_out


def _converters(exported: Exported) -> dict[str, Callable[..., Any]]:
    """Converters for the operators that the importer's own converters do not serve well."""
    reduced = {torch.float16, torch.bfloat16} & {x.dtype for x in exported.program.state_dict.values()}
    return _of_batch_norm(exported) | _of_powers() | (_of_products() if reduced else {})


def _of_batch_norm(exported: Exported) -> dict[str, Callable[..., Any]]:
    """A batch norm with constant statistics becomes x * scale + shift; both are computed here.

    TVM would reach the same by folding constants. It compiles and runs a function for each of them, more than a thousand in
    NASNet-A, which takes longer than all the rest.
    """
    from tvm import relax

    names = {spec.arg.name: spec.target for spec in exported.program.graph_signature.input_specs}

    def value_of(argument: Any) -> torch.Tensor | None:
        value = exported.program.state_dict.get(names.get(getattr(argument, "name", "")) or "")
        return None if value is None else value.detach().cpu().double()

    def batch_norm(node: Any, importer: Any) -> Any:
        x, *statistics, _, epsilon = node.args  # weight, bias, mean, variance
        values = [value_of(argument) for argument in statistics]
        mean, variance = values[2:]
        if (
            mean is None
            or variance is None
            or any(v is None and s is not None for v, s in zip(values, statistics, strict=True))
        ):
            return importer._batch_norm_legit_no_training(node)
        scale = torch.rsqrt(variance + epsilon)
        scale = scale if values[0] is None else scale * values[0]
        shift = -mean * scale if values[1] is None else values[1] - mean * scale
        like = x.meta["val"]
        by, plus = (c.to(like.dtype).view(1, -1, *[1] * (like.dim() - 2)) for c in (scale, shift))
        by, plus = (relax.const(importer._convert_pytorch_tensor_to_tvm(c)) for c in (by, plus))
        return importer.block_builder.emit(relax.op.add(relax.op.multiply(importer.env[x], by), plus))

    return {"_native_batch_norm_legit_no_training.default": batch_norm}


def _of_powers() -> dict[str, Callable[..., Any]]:
    """Whole powers up to the fourth become products.

    TVM computes a power on a GPU by CUDA's fast function, which takes a logarithm: the square of a negative number is NaN.
    """
    from tvm import relax

    def power(node: Any, importer: Any) -> Any:
        exponent = node.args[1]
        if exponent not in (2, 3, 4):
            return importer._pow(node)
        x = importer.env[node.args[0]]
        square = importer.block_builder.emit(relax.op.multiply(x, x))
        if exponent == 2:
            return square
        return importer.block_builder.emit(relax.op.multiply(square, x if exponent == 3 else square))

    return {"pow.Tensor_Scalar": power}


def _of_products() -> dict[str, Callable[..., Any]]:
    """For models in float16 and bfloat16: products accumulate in float32 and are rounded to the model's dtype.

    The importer's own converters leave the products in float32, whatever the inputs are, and then fail to add a bias.
    """
    from tvm.relax import op

    def product(left: Any, right: Any) -> Any:
        return op.astype(op.matmul(left, right, out_dtype="float32"), left.ty.dtype)

    def matmul(node: Any, importer: Any) -> Any:
        return importer.block_builder.emit(product(*importer.retrieve_args(node)))

    def addmm(node: Any, importer: Any) -> Any:
        if node.kwargs:  # alpha, beta
            return importer._addmm(node)
        bias, left, right = importer.retrieve_args(node)
        return importer.block_builder.emit(op.add(bias, product(left, right)))

    def convolution(node: Any, importer: Any) -> Any:
        x, weight, bias, strides, padding, dilation, transposed, _, groups = importer.retrieve_args(node)
        if transposed or len(strides) != 2:
            return importer._convolution(node)
        options = {"strides": strides, "padding": padding, "dilation": dilation, "groups": groups}
        y = op.astype(op.nn.conv2d(x, weight, **options, out_dtype="float32"), x.ty.dtype)
        return importer.block_builder.emit(y if bias is None else op.add(y, op.reshape(bias, (1, -1, 1, 1))))

    products = dict.fromkeys(("mm.default", "bmm.default", "matmul.default"), matmul)
    return {**products, "addmm.default": addmm, "convolution.default": convolution}


def build(module: Any, target: Any, folder: Path, database: Any = None) -> dict[str, JSON]:
    """Schedule the functions of a `lowered` module and write the library for `target` into `folder`, as LIBRARY.

    A function has the best schedule that the database knows for it, else TVM's default: on a GPU the first rule of dlight
    that applies. TVM has no default for a CPU, where loops would run as written, on one core. So a CPU's functions have a
    sample of MetaSchedule's own schedule space, drawn with a fixed seed, unmeasured.

    Args:
        database: Of MetaSchedule.

    Returns:
        functions: How many the library has.
        tuned: With a database, how many of them it knows.
    """
    import tvm
    from tvm import relax, tirx

    with ExitStack() as stack:
        stack.enter_context(quiet())
        stack.enter_context(target)
        if database is not None:
            stack.enter_context(database)
            module = relax.transform.MetaScheduleApplyDatabase()(module)
        functions = [f for f in module.functions.values() if isinstance(f, tirx.PrimFunc)]
        counts: dict[str, JSON] = {"functions": len(functions)}
        if database is not None:
            counts["tuned"] = sum(map(_is_scheduled, functions))
        if target.kind.name == "llvm":
            module = _sampled(module, target)
        # On a GPU the default pipeline applies dlight's rules to functions without a schedule.
        executable = tvm.compile(module, target=target)
        executable.export_library(str(folder / LIBRARY))
    return counts


def _sampled(module: Any, target: Any) -> Any:
    from tvm import tirx

    register_intrinsics()
    for variable, function in list(module.functions.items()):
        if isinstance(function, tirx.PrimFunc) and not _is_scheduled(function):
            module.update_func(variable, _sample(function, target))
    return module


def _is_scheduled(function: Any) -> bool:
    return bool(function.attrs) and SCHEDULED in function.attrs


def default_schedule(function: Any, target: Any) -> Any:
    """A module of one function, with the schedule that `build` gives it without a database."""
    import tvm
    from tvm.relax.backend.cuda.pipeline import legalize_passes

    if target.kind.name == "llvm":
        return tvm.IRModule({"main": _sample(function["main"], target)})
    with target:
        return legalize_passes(target)[-1](tvm.IRModule(function.functions))  # dlight's rules, which change the module


def _sample(function: Any, target: Any) -> Any:
    """`function` with a schedule of MetaSchedule's space; unchanged if no sample is valid."""
    import tvm
    from tvm.s_tir import meta_schedule

    options = {"target": target, "space_generator": "post-order-apply", "num_threads": 1, "rand_state": SEED}
    context = meta_schedule.TuneContext(tvm.IRModule({"main": function}), **options)
    for _ in range(ATTEMPTS):
        for schedule in reversed(context.generate_design_space()):  # the last is the most structured
            schedule.enter_postproc()
            if all(rule.apply(schedule) for rule in context.space_generator.postprocs):
                return schedule.mod["main"]
    return function


def register_intrinsics() -> None:
    """Import TVM's tensor intrinsics, which its schedule space names.

    They are TVMScript. Its parser calls inspect.getmodule for each frame on the stack, which searches all of sys.modules if
    the frame's file is no module's: a minute beside PyTorch. A file's module stays the same, so one call a file is enough.
    """
    before = inspect.getmodule
    inspect.getmodule = _remembering(before)
    try:
        import tvm.s_tir.tensor_intrin  # noqa: F401
    finally:
        inspect.getmodule = before


def _remembering(getmodule: Callable[..., Any]) -> Callable[..., Any]:
    modules_by_file: dict[str, object] = {}

    def remembered(thing: Any, _filename: str | None = None) -> Any:
        code = thing.f_code if inspect.isframe(thing) else thing
        if not inspect.iscode(code):
            return getmodule(thing, _filename)
        if code.co_filename not in modules_by_file:
            modules_by_file[code.co_filename] = getmodule(thing, _filename)
        return modules_by_file[code.co_filename]

    return remembered


@contextmanager
def cuda_headers() -> Iterator[None]:
    """Within, TVM's CUDA compiler (NVRTC) finds CUDA's headers.

    They are a toolkit's or, without one, those that came with PyTorch from PyPI, laid out as a toolkit's.
    """
    headers = _headers_of_pytorch()
    if _toolkit() or headers is None:
        yield
        return
    with TemporaryDirectory(prefix="opweave-") as folder:
        target = Path(folder) / TARGET
        target.mkdir(parents=True)
        (target / "include").symlink_to(headers)
        before = os.environ.get("CUDA_PATH")
        os.environ["CUDA_PATH"] = folder
        try:
            yield
        finally:
            del os.environ["CUDA_PATH"]
            if before is not None:
                os.environ["CUDA_PATH"] = before


def _toolkit() -> bool:
    """Does TVM find a toolkit that has headers?"""
    from tvm.support import nvcc

    try:
        folder = Path(nvcc.find_cuda_path())
    except RuntimeError:
        return False
    return any((folder / part / "include" / HEADER).exists() for part in ("", TARGET))


def _headers_of_pytorch() -> Path | None:
    nvidia = importlib.util.find_spec("nvidia")
    folders = (nvidia.submodule_search_locations or ()) if nvidia else ()
    return next((file.parent for folder in folders for file in sorted(Path(folder).glob(f"cu*/include/{HEADER}"))), None)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence MetaSchedule's log of its steps within; its errors stay."""
    logger = logging.getLogger(LOGGER)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
