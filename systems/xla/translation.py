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
from io import BytesIO
from signal import Signals
from tempfile import TemporaryFile
from threading import Thread
from typing import IO, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram, ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import InputKind, InputSpec
from torch.utils._pytree import tree_structure

from conf.text import first_line, named_line
from systems.base import Unsupported
from systems.compilers.exported import Exported

from .operators import count_in_floats, reduce_equal_bags, register

Heading: TypeAlias = dict[str, Any]  # what JSON holds

NARROW = {torch.int64: torch.int32}  # JAX computes with integers of 32 bits
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
    try:
        answer, _ = _run({})
    except ChildProcessError as error:
        return str(error)
    return answer.get("reason")


def translated(exported: Exported) -> Translation:
    """The program for its device, with TF32 where `exported.allow_tf32`.

    Raises:
        Unsupported: torch.export cannot save it, or torchax lacks an operator of it.
        ChildProcessError: the process that translates it ended before it had said more, for want of memory or room, say.
    """
    program = BytesIO()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of tensors that share one element
            torch.export.save(_bare(exported.program), program)
    except LACKS:
        raise
    except Exception as error:  # saving raises whatever it finds in a program
        raise Unsupported(f"torch.export cannot save it: {named_line(error)}") from error
    targets = {node.target for node in exported.program.graph.nodes}
    operators = sorted(target.name() for target in targets if isinstance(target, torch._ops.OpOverload))
    precision = "tensorfloat32" if exported.allow_tf32 else "float32"
    heading = {"operators": operators, "platform": exported.device.type, "precision": precision}
    answer, function = _run(heading, program.getvalue())
    if "reason" in answer:
        raise Unsupported(f"torchax cannot translate it: {answer['reason']}")
    return Translation(bytearray(function), tuple(answer["weights"]))


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


def _run(heading: Heading, program: bytes = b"") -> tuple[Heading, bytes]:
    """Run `main` in a new process, which ends before this returns or raises.

    What the two say to each other lies in files without a name: whatever ends them, nothing is left. Nobody else can
    write there, and loading a program unpickles.

    Args:
        heading, program: arguments of `_translate`; none to import torchax alone.

    Returns:
        "weights" with a function, or "reason", why there is none; neither where nothing was to be translated.

    Raises:
        ChildProcessError: the process ended before it had answered.
    """
    # All that this process imports from, in its order: Python's own modules come before those of packages.
    environment = os.environ | NO_GPU | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    with TemporaryFile() as question, TemporaryFile() as answer, TemporaryFile() as output:
        _write(question, heading, program)
        files = question.fileno(), answer.fileno()
        command = [sys.executable, "-P", "-m", __name__, *map(str, files)]
        # Its standard input stays open for as long as this process lives, which it watches.
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=output, env=environment, pass_fds=files
        ) as process:
            try:
                status = process.wait()
            finally:
                process.kill()
        if status:
            output.seek(0)
            last = first_line("\n".join(reversed(output.read().decode(errors="replace").splitlines())))
            end = f"by {Signals(-status).name}" if status < 0 else f"with status {status}"
            raise ChildProcessError(f"the process of torchax ended {end}" + (f": {last}" if last else ""))
        return _read(answer)


def _write(file: IO[bytes], heading: Heading, body: bytes) -> None:
    file.write(json.dumps(heading).encode() + b"\n" + body)
    file.flush()


def _read(file: IO[bytes]) -> tuple[Heading, bytes]:
    file.seek(0)
    heading: Heading = json.loads(file.readline())
    return heading, file.read()


def _translate(heading: Heading, saved: bytes) -> tuple[Heading, bytes]:
    """The program as a function with its weights' names, made on the CPU for any platform: XLA alone knows devices.

    Args:
        heading: "operators" names all that the program calls, "precision" that of products; "platform" is "cpu" or "cuda".
        saved: the program, as torch.export saves it.
    """
    import jax
    import jax.export
    from torch.export.passes import move_to_device_pass
    from torchax.decompositions import DECOMPOSITIONS
    from torchax.export import JaxInterpreter

    for name in heading["operators"]:
        namespace, _, operator = name.partition("::")
        if not hasattr(getattr(torch.ops, namespace), operator.partition(".")[0]):  # which loading does not name
            raise LookupError(f"{name} is no operator of torch")
    program = torch.export.load(BytesIO(saved))
    reduce_equal_bags(program)
    count_in_floats(program)
    nodes = [node for node in program.graph.nodes if node.op == "placeholder"]
    for node, spec in zip(nodes, program.graph_signature.input_specs, strict=True):
        _set_strides(program, spec, node.meta["val"])
    if heading["platform"] != "cpu":
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

    with jax.default_matmul_precision(heading["precision"]):
        lowered = jax.export.export(jax.jit(tensors), platforms=[heading["platform"]])(_avals(weights), _avals(inputs))
    return {"weights": [names[id(weight)] for weight in weights]}, bytes(lowered.serialize())


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


def main(question: str, answer: str) -> None:
    """Import torchax, and translate the program that is asked about. The answer is a reason if it cannot be done.

    question, answer: numbers of open files.
    """
    Thread(target=_end_with_parent, daemon=True).start()
    gc.disable()  # collecting takes a sixth of the time
    with open(int(question), "rb") as asked, open(int(answer), "wb") as answered:
        heading, program = _read(asked)
        try:
            import torchax.export
            import torchax.ops.jaten  # noqa: F401 - operators come into its registry by their import

            if program:
                register()
            told, function = _translate(heading, program) if program else ({}, b"")
        except LACKS:  # with which this process ends
            raise
        except Exception as error:  # whatever torchax or JAX raises of an operator that it lacks
            told, function = {"reason": named_line(error)}, b""
        _write(answered, told, function)


if __name__ == "__main__":
    main(*sys.argv[1:])
