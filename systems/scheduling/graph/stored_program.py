"""A captured program as data, and back over another instance of its module, without tracing it again."""

import base64
import hashlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, treespec_dumps, treespec_loads

from systems.training.restore import plain_attributes, state_kept

from .operator_graph import Operator, OperatorGraph
from .program import Call, Input, Output, Program

LARGEST_CONSTANT = 1 << 16  # bytes; a larger one would make the document long
PLAIN = (type(None), bool, int, float, str)
DEPTH = 3  # levels of an attribute that tell one module from another: a configuration holds mappings of lists
READERS_OF_FILES = ("from_file",)
NAMED: dict[str, type] = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}


class NotStorable(ValueError):
    """A program holds something that this data cannot; the message says what."""


def description(module: nn.Module) -> list[str]:
    """What a module is without its weights' values, as far as nobody has to run it: its submodules with their numbers and
    attributes, the files of their classes, and shapes, strides and types of its state.

    It knows no other files and no variables: a program that was stored is compared with the module.
    """
    classes = {f"{type(each).__module__}.{type(each).__qualname__}" for each in module.modules()}
    files = {type(each).__module__ for each in module.modules()}
    state = [
        f"{name} {tensor.dtype} {[*tensor.shape]} {tensor.stride()}"
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    ]
    attributes = [
        f"{path}.{name} = {_in_words(value, DEPTH)}"
        for path, part in module.named_modules()
        for name, value in sorted(plain_attributes(part).items())
    ]
    return [repr(module), *sorted(classes), *(_content(name) for name in sorted(files)), *state, *attributes]


def _in_words(value: Any, depth: int) -> str:
    """An attribute, the same in every process: numbers and words as they are, tensors by their form, and of another object
    its class and what it holds, `depth` levels deep.
    """
    if isinstance(value, Tensor):
        return f"tensor {value.dtype} {[*value.shape]} {value.stride()}"
    if isinstance(value, (*PLAIN, complex, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return repr(value)
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, nn.Module) or depth == 0:
        return kind
    if isinstance(value, Mapping):
        return f"{kind} {[(_in_words(key, 0), _in_words(each, depth - 1)) for key, each in value.items()]}"
    if isinstance(value, (tuple, list)):
        return f"{kind} {[_in_words(each, depth - 1) for each in value]}"
    if isinstance(value, (set, frozenset)):
        return f"{kind} {sorted(_in_words(each, depth - 1) for each in value)}"
    if (name := getattr(value, "__qualname__", None)) is not None:
        return f"{kind} {getattr(value, '__module__', '')}.{name}"
    public = {name: each for name, each in getattr(value, "__dict__", {}).items() if not name.startswith("_")}
    return f"{kind} {[(name, _in_words(each, depth - 1)) for name, each in sorted(public.items())]}"


def to_document(program: Program, module: nn.Module) -> dict[str, Any]:
    """The program as data for `json.dump`; `from_document` reads it.

    Args:
        program: as captured from the module.

    Raises:
        NotStorable: an operator is none of PyTorch's, or writes a buffer of the module; or an argument is neither plain data
            nor of the module's state.
    """
    names = {id(t): name for name, t in _state(module).items()}

    def leaf(value: Any) -> Any:
        return _leaf(value, names, program.device)

    calls = []
    for operator, call in zip(program.graph.operators, program.calls, strict=True):
        if not isinstance(call.function, torch._ops.OpOverload):
            raise NotStorable(f"{operator.target} is no operator of PyTorch")
        if call.function._schema.is_mutable:
            raise NotStorable(f"{operator.target} writes an argument")
        arguments = _written(call.args, leaf), _written(call.kwargs, leaf)
        calls.append([operator.name, str(call.function), *arguments, _written(call.produces, _on_meta)])
    try:
        structure = treespec_dumps(program.output_spec)
    except (NotImplementedError, TypeError, ValueError) as error:
        raise NotStorable(f"the structure of the outputs: {error}") from error
    return {"calls": calls, "outputs": _written(program.outputs, leaf), "structure": structure}


def from_document(document: Mapping[str, Any], module: nn.Module, inputs: tuple[Tensor, ...]) -> Program:
    """The program over this module's own parameters and buffers.

    Args:
        inputs: as those that it was captured with.

    Raises:
        KeyError, TypeError, ValueError, AttributeError, IndexError: it is not of `to_document`, or not of such a module.
    """
    state, device = _state(module), inputs[0].device if inputs else torch.device("cpu")

    def leaf(kind: str, value: Any) -> Any:
        return state[value] if kind == "state" else _value(kind, value, device)

    calls, operators, predecessors = [], [], []
    for v, (name, target, args, kwargs, produces) in enumerate(document["calls"]):
        call = Call(_operator(target), _read(args, leaf), _read(kwargs, leaf), _read(produces, leaf))
        if strange := [key for key in call.kwargs if not key.isidentifier()]:
            raise ValueError(f"operator {v} has an argument {strange[0]!r}, which is no name")
        if not all(0 <= o.operator < v for o in call.references()):
            raise ValueError(f"operator {v} reads one that follows it")
        operators.append(Operator(v, str(name), str(target)))
        calls.append(call)
        predecessors.append([o.operator for o in call.references()])
    outputs = _read(document["outputs"], leaf)
    return Program(OperatorGraph(operators, predecessors), calls, outputs, treespec_loads(document["structure"]), inputs)


def answer_of(module: nn.Module, inputs: tuple[Tensor, ...]) -> Any:
    """What the module returns. It is left as it was, and so are the random generators."""
    with state_kept(module):
        return module(*inputs)


def _state(module: nn.Module) -> dict[str, Tensor]:
    """Parameters, buffers and tensors among the attributes by name, also where two names have one tensor."""
    attributes = {
        f"{path}.{name}[{i}]": leaf
        for path, part in module.named_modules()
        for name, value in plain_attributes(part).items()
        for i, leaf in enumerate(tree_leaves(value))
        if isinstance(leaf, Tensor)
    }
    parameters, buffers = module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    return attributes | dict([*parameters, *buffers])


def _content(name: str) -> str:
    """A digest of the file of an imported module; of PyTorch's own its version says as much."""
    file = getattr(sys.modules.get(name), "__file__", None)
    if name.partition(".")[0] == "torch" or file is None:
        return name
    return f"{name} {hashlib.sha256(Path(file).read_bytes()).hexdigest()}"


def _operator(target: str) -> torch._ops.OpOverload:
    namespace, name, overload = target.split(".")
    operator = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    if not isinstance(operator, torch._ops.OpOverload) or operator._schema.is_mutable or name in READERS_OF_FILES:
        raise ValueError(f"{target} is no operator that a capture leaves")
    return operator


def _written(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Plain data as it is; whatever else as {kind: data}."""
    if isinstance(value, tuple):
        return {"tuple": [_written(v, leaf) for v in value]}
    if isinstance(value, list):
        return [_written(v, leaf) for v in value]
    if isinstance(value, dict):
        return {"dict": {key: _written(v, leaf) for key, v in value.items()}}
    return value if type(value) in PLAIN else leaf(value)


def _read(document: Any, leaf: Callable[[str, Any], Any]) -> Any:
    if isinstance(document, list):
        return [_read(v, leaf) for v in document]
    if not isinstance(document, dict):
        return document
    ((kind, value),) = document.items()
    if kind == "tuple":
        return tuple(_read(v, leaf) for v in value)
    return {key: _read(v, leaf) for key, v in value.items()} if kind == "dict" else leaf(kind, value)


def _leaf(value: Any, names: Mapping[int, str], device: torch.device) -> Any:
    if isinstance(value, Output):
        return {"output": [value.operator, value.index]}
    if isinstance(value, Input):
        return {"input": value.index}
    if isinstance(value, Tensor):
        return {"state": names[id(value)]} if id(value) in names else _constant(value)
    if isinstance(value, torch.device):
        return {"device": None if value == device or (value.index is None and value.type == device.type) else str(value)}
    for kind, of_type in NAMED.items():
        if isinstance(value, of_type):
            return {kind: str(value).removeprefix("torch.")}
    raise NotStorable(f"a {type(value).__name__} among the arguments")


def _on_meta(value: Any) -> Any:
    if not isinstance(value, Tensor):
        raise NotStorable(f"a {type(value).__name__} among what operators return")
    return {"meta": [str(value.dtype).removeprefix("torch."), [*value.shape], [*value.stride()]]}


def _constant(value: Tensor) -> Any:
    if value.numel() * value.element_size() > LARGEST_CONSTANT:
        raise NotStorable(f"a constant of {value.numel()} elements")
    content = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    on = "cpu" if value.device.type == "cpu" else None
    return {"constant": [str(value.dtype).removeprefix("torch."), [*value.shape], on, base64.b64encode(content).decode()]}


def _number(value: object) -> int:
    """The number of an operator or an input, which stands in the source of a call. Raises TypeError for anything else."""
    if type(value) is not int:
        raise TypeError(f"{value!r} is no number of an operator or an input")
    return value


def _value(kind: str, value: Any, device: torch.device) -> Any:
    if kind == "output":
        operator, index = value
        return Output(_number(operator), None if index is None else _number(index))
    if kind == "input":
        return Input(_number(value))
    if kind == "device":
        return device if value is None else torch.device(value)
    if kind == "meta":
        dtype, shape, strides = value
        return torch.empty_strided(shape, strides, dtype=getattr(torch, dtype), device="meta")
    if kind == "constant":
        dtype, shape, on, content = value
        flat = torch.frombuffer(bytearray(base64.b64decode(content)), dtype=torch.uint8) if content else torch.empty(0)
        return flat.view(getattr(torch, dtype)).view(shape).to(device if on is None else on)
    if kind not in NAMED:
        raise ValueError(f"there is no kind {kind}")
    named = getattr(torch, value)
    if not isinstance(named, NAMED[kind]):
        raise ValueError(f"{value} is no {kind}")
    return named
