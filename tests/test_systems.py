"""Every system against eager on real models of the zoo."""

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import conf
import models
import systems
from results.cell import Cell, Conditions, choose
from runners.measurements.correctness import relative_error
from runners.showings.registry import showing
from systems.base import BadOption, Unsupported
from systems.scheduling.passes.rewriting import SWITCHES

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
FUSED = dict.fromkeys(SWITCHES, True)
ON_CPU = [
    ("torchscript", {}, "resnet18"),
    ("nimble", {}, "squeezenet"),
    ("nimble", {"multi_stream": False}, "resnet18"),
    ("ios", FUSED, "squeezenet"),
]
# On a GPU PyTorch groups the products of experts in bf16 alone; else transformers asks the GPU how many rows each has.
ZOO = [m for m in models.names() if m not in ("nasnet_large", "efficientnet_b5", "qwen3_moe")]
SMALL = {m: {"size": "small"} for m in models.names() if "size" in conf.options("model", m)}
ON_GPU = [(s, {}, m) for s in ("cuda_graph", "nimble") for m in ZOO]
ON_GPU += [(s, FUSED, m) for s in ("ios", "opara") for m in ("squeezenet", "googlenet")]
COMPILED = [("torch_compile", {"mode": "default", "layout": "channels_last"}, "squeezenet")]
ON_GPU += COMPILED
LONG = [*COMPILED, ("torch_compile", {}, "mobilenet_v2_cifar10"), ("nimble", {}, "nasnet")]  # C++ is compiled for a minute
LONG += [("nimble", {}, "googlenet"), ("nimble", {}, "efficientnet_b0_cifar10"), ("opara", FUSED, "mobilenet_v2_cifar10")]


@pytest.mark.parametrize(
    ("system", "options", "model", "device"),
    [
        *((s, o, m, "cpu") for s, o, m in ON_CPU),
        *(pytest.param(s, o, m, "cpu", marks=pytest.mark.slow) for s, o, m in LONG),
        *(pytest.param(s, o, m, "cuda", marks=GPU) for s, o, m in ON_GPU),
    ],
)
def test_agrees_with_eager_on_inputs_drawn_after_preparation(
    system: str, options: dict, model: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In TF32 what is computed in another order differs by as much as TF32 itself does from fp32.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    loaded = models.load(model, 1, device=device, **SMALL.get(model, {}))
    ready = systems.load(system, **options)
    if reason := ready.unsupported(device):
        pytest.skip(reason)
    prepared = ready.prepare(loaded.module, loaded.inputs)
    for seed in (11, 12):
        inputs = loaded.fresh_inputs(seed)
        with torch.no_grad():
            expected = loaded.module(*inputs)
        for out, reference in zip(tree_leaves(prepared(*inputs)), tree_leaves(expected), strict=True):
            assert relative_error(out, reference) < (1e-4 if device == "cpu" else 1e-3)
    prepared.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("system", ["cuda_graph", "nimble"])
def test_experts_are_captured_where_pytorch_groups_their_products(system: str) -> None:
    loaded = models.load("qwen3_moe", 1, **SMALL["qwen3_moe"])
    loaded = models.place(loaded, device="cuda", precision="bf16", layout="contiguous")
    prepared = systems.load(system).prepare(loaded.module, loaded.inputs)
    for seed in (11, 12):
        inputs = loaded.fresh_inputs(seed)
        with torch.no_grad():
            expected = loaded.module(*inputs)
        for out, reference in zip(tree_leaves(prepared(*inputs)), tree_leaves(expected), strict=True):
            assert relative_error(out, reference) < 1e-2
    prepared.close()


@pytest.mark.parametrize("options", [{"sequence": 16}, {"sequence": 24}])
@pytest.mark.slow
def test_nimble_runs_attention(options: dict) -> None:
    loaded = models.load("bert", 2, **options)
    prepared = systems.load("nimble").prepare(loaded.module, loaded.inputs)
    inputs = loaded.fresh_inputs(5)
    with torch.no_grad():
        for got, expected in zip(prepared(*inputs), loaded.module(*inputs), strict=True):
            assert relative_error(got, expected) < 1e-4
    prepared.close()


def test_a_cuda_graph_needs_a_gpu() -> None:
    assert systems.load("cuda_graph").unsupported("cpu") == "a CUDA Graph needs a CUDA device"
    assert systems.load("cuda_graph").unsupported("cuda") is None


def test_wrong_names_and_options_are_told() -> None:
    with pytest.raises(ValueError, match="did you mean nimble"):
        systems.load("nimbel")
    with pytest.raises(ValueError, match="a system has a name, as 'weave', and None is none"):
        systems.load(None)  # type: ignore[arg-type]
    with pytest.raises(BadOption, match="max-autotune"):
        systems.load("torch_compile", mode="fast")


def test_systems_without_a_schedule_say_so() -> None:
    runner = choose("runner", "schedule")
    for name in ("eager", "torchscript", "torch_compile", "cuda_graph"):
        cell = Cell(choose("model", "squeezenet"), choose("system", name), runner, Conditions(1, "cpu"))
        with pytest.raises(Unsupported, match="has no schedule"):
            showing(runner).show(cell, "0", lambda _: None)


def test_a_model_without_an_operator_is_nothing_to_schedule() -> None:
    for name in ("nimble", "ios", "opara"):
        with pytest.raises(Unsupported, match="has no operator"):
            systems.load(name).prepare(nn.Identity(), (torch.randn(2),))
