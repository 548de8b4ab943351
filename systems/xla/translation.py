"""A module in StableHLO, which torchax makes of it in a process of its own.

Importing torchax gives torch's privateuse1 backend another name. On a GPU, backward passes and pinned memory then fail.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from tempfile import TemporaryDirectory, TemporaryFile
from threading import Thread
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram, ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import InputKind, InputSpec
from torch.utils._pytree import tree_structure

from conf.text import first_line, named_line
from systems.base import Unsupported
from systems.compilers.exported import Exported

from .operators import count_in_floats, reduce_equal_bags, register

NARROW = {torch.int64: torch.int32}  # JAX computes with integers of 32 bits
# Files of one translation.
PROGRAM, OPERATORS, FUNCTION, WEIGHTS, REASON = "program.pt2", "operators.json", "function.jax", "weights.json", "reason"
LACKS = (OSError, MemoryError)  # of room or memory, which say nothing of the program
NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}  # translating needs none


@dataclass(frozen=True)
class Translation:
    """A program as a function of JAX.

    Args:
        function: a serialised `jax.export.Exported` of (weights, inputs), which returns the program's tensors in order.
        weights: names of the weights that it takes, each a key of the program's `state_dict` or `constants`.
    """

    function: bytearray
    weights: tuple[str, ...]


def why_no_torchax() -> str | None:
    """Why torchax cannot be imported, in one line, or None."""
    with TemporaryDirectory(prefix="opweave-") as folder:
        try:
            return _run("check", folder)
        except ChildProcessError as error:
            return str(error)


def translated(exported: Exported) -> Translation:
    """The program for its device, with TF32 where `exported.allow_tf32`.

    Raises:
        Unsupported: torch.export cannot save it, or torchax lacks an operator of it.
        ChildProcessError: the process that translates it ended before it had said more, for want of memory or room, say.
    """
    with TemporaryDirectory(prefix="opweave-") as name:  # which nobody else can write: loading a program unpickles
        folder = Path(name)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of tensors that share one element
                torch.export.save(_bare(exported.program), folder / PROGRAM)
        except LACKS:
            raise
        except Exception as error:  # saving raises whatever it finds in a program
            raise Unsupported(f"torch.export cannot save it: {named_line(error)}") from error
        targets = {node.target for node in exported.program.graph.nodes}
        operators = sorted(target.name() for target in targets if isinstance(target, torch._ops.OpOverload))
        (folder / OPERATORS).write_text(json.dumps(operators))
        precision = "tensorfloat32" if exported.allow_tf32 else "float32"
        if reason := _run("translate", name, exported.device.type, precision):
            raise Unsupported(f"torchax cannot translate it: {reason}")
        return Translation(bytearray((folder / FUNCTION).read_bytes()), tuple(json.loads((folder / WEIGHTS).read_text())))


def _bare(program: ExportedProgram) -> ExportedProgram:
    """The program from flat inputs to flat outputs, without its weights' values and the types of its module."""
    (root, *_) = program.module_call_graph
    assert root.signature is not None and root.signature.out_spec is not None
    outputs = tree_structure((0,) * root.signature.out_spec.num_leaves)
    return ExportedProgram(
        root=program.graph_module,
        graph=program.graph,
        graph_signature=program.graph_signature,
        state_dict={name: _stand_in(value) for name, value in program.state_dict.items()},
        range_constraints=program.range_constraints,
        module_call_graph=[ModuleCallEntry("", ModuleCallSignature([], [], root.signature.in_spec, outputs))],
        constants={name: _stand_in(value) for name, value in program.constants.items()},
        verifiers=program.verifiers,
    )


def _stand_in(value: Any) -> Any:
    """A tensor of that shape and type in the memory of one element."""
    if not isinstance(value, Tensor):
        return value
    zeros = torch.zeros(value.shape if value.numel() == 0 else (), dtype=value.dtype).expand(value.shape)
    return nn.Parameter(zeros, requires_grad=False) if isinstance(value, nn.Parameter) else zeros


def _run(*arguments: str) -> str | None:
    """Run `main` in a new process, which ends before this returns or raises.

    Args:
        arguments: of `main`; the second is a folder.

    Returns:
        Why it did not do as it was asked, in one line, or None.

    Raises:
        ChildProcessError: the process ended before it had said so.
    """
    # All that this process imports from, in its order: Python's own modules come before those of packages.
    environment = os.environ | NO_GPU | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    command = [sys.executable, "-P", "-m", __name__, *arguments]
    with TemporaryFile() as output:
        # Its standard input stays open for as long as this process lives, which it watches.
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output, env=environment) as process:
            try:
                status = process.wait()
            finally:
                process.kill()
        if status:
            output.seek(0)
            last = first_line("\n".join(reversed(output.read().decode(errors="replace").splitlines())))
            end = f"by {Signals(-status).name}" if status < 0 else f"with status {status}"
            raise ChildProcessError(f"the process of torchax ended {end}" + (f": {last}" if last else ""))
    reason = Path(arguments[1]) / REASON
    return reason.read_text() if reason.exists() else None


def _translate(folder: Path, platform: str, precision: str) -> None:
    """Make FUNCTION and WEIGHTS of PROGRAM, on the CPU for any platform: XLA alone knows devices."""
    import jax
    import jax.export
    from torch.export.passes import move_to_device_pass
    from torchax.decompositions import DECOMPOSITIONS
    from torchax.export import JaxInterpreter

    for name in json.loads((folder / OPERATORS).read_text()):
        namespace, _, operator = name.partition("::")
        if not hasattr(getattr(torch.ops, namespace), operator.partition(".")[0]):  # which loading does not name
            raise LookupError(f"{name} is no operator of torch")
    program = torch.export.load(folder / PROGRAM)
    reduce_equal_bags(program)
    count_in_floats(program)
    nodes = [node for node in program.graph.nodes if node.op == "placeholder"]
    for node, spec in zip(nodes, program.graph_signature.input_specs, strict=True):
        _set_strides(program, spec, node.meta["val"])
    if platform != "cpu":
        program = move_to_device_pass(program, "cpu")
    names = {id(value): name for name, value in [*program.state_dict.items(), *program.constants.items()]}
    inputs = [node.meta["val"] for node in nodes if node.name in program.graph_signature.user_inputs]
    with torch.no_grad():
        program = program.run_decompositions().run_decompositions(DECOMPOSITIONS)
    signature, values = program.graph_signature, {**program.state_dict, **program.constants}
    weights = [values[spec.target] for spec in signature.input_specs if spec.kind is not InputKind.USER_INPUT]
    num_written = len(signature.buffers_to_mutate)

    def tensors(weights: list[Any], inputs: list[Any]) -> list[Any]:
        outputs = JaxInterpreter(program.graph_module).run(*weights, *inputs, enable_io_processing=False)[num_written:]
        return [output for output in outputs if isinstance(output, jax.Array)]

    with jax.default_matmul_precision(precision):
        lowered = jax.export.export(jax.jit(tensors), platforms=[platform])(_avals(weights), _avals(inputs))
    (folder / FUNCTION).write_bytes(lowered.serialize())
    (folder / WEIGHTS).write_text(json.dumps([names[id(weight)] for weight in weights]))


def _set_strides(program: ExportedProgram, spec: InputSpec, like: Any) -> None:
    """Give a stand-in its weight's strides, by which some views are allowed; nothing touches its memory."""
    for tensors in (program.state_dict, program.constants):
        if spec.target is not None and isinstance(old := tensors.get(spec.target), Tensor):
            new = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
            tensors[spec.target] = nn.Parameter(new, requires_grad=False) if isinstance(old, nn.Parameter) else new


def _avals(tensors: list[Tensor]) -> list[Any]:
    import jax
    import jax.numpy as jnp

    names = [str(NARROW.get(t.dtype, t.dtype)).removeprefix("torch.") for t in tensors]
    return [jax.ShapeDtypeStruct(tuple(t.shape), jnp.dtype(name)) for t, name in zip(tensors, names, strict=True)]


def _end_with_parent() -> None:
    while os.read(0, 1):  # until the end of the standard input, which is that of the parent
        pass
    os._exit(1)


def main(task: str, folder: str, *arguments: str) -> None:
    """Import torchax, and translate the folder's program if that is the task. REASON is there if it cannot be done."""
    Thread(target=_end_with_parent, daemon=True).start()
    gc.disable()  # collecting takes a sixth of the time
    try:
        import torchax.export
        import torchax.ops.jaten  # noqa: F401 - operators come into its registry by their import

        if task == "translate":
            register()
            _translate(Path(folder), *arguments)
    except LACKS:  # with which this process ends
        raise
    except Exception as error:  # whatever torchax or JAX raises of an operator that it lacks
        (Path(folder) / REASON).write_text(named_line(error))


if __name__ == "__main__":
    main(*sys.argv[1:])
