"""The networks themselves: they compute something, they match independent implementations, and they export."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import networkx as nx
import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn
from torchvision.models.resnet import Bottleneck
from torchvision.models.segmentation.deeplabv3 import ASPPPooling

import models
from models.nasnet import REDUCTION, NASNet, Separable
from models.randwire import NODES, wiring
from runners.measurements.correctness import relative_error

TODAY = (
    *("clip_vit_b32", "convnext_t", "deepfm", "deeplabv3_resnet50", "dlrm", "gptj_6b", "gptj_6b_decode", "mobilenet_v4"),
    *("qwen3_moe", "retinanet_heads", "sd15_unet", "swin_t", "vit_b16", "whisper_small"),
)
CHEAP = {
    **{name: {"size": "small"} for name in TODAY},
    "amoebanet": {},
    "bert": {"sequence": 16, "layers": 3},
    "darts": {},
    "efficientnet_b0": {},
    "efficientnet_b0_cifar10": {},
    "googlenet": {},
    "gpt": {"sequence": 16},
    "inception_v3": {},
    "mobilenet_v2": {},
    "mobilenet_v2_cifar10": {},
    "nasnet": {},
    "randwire": {},
    "resnet18": {},
    "resnet50": {},
    "resnet50_cifar10": {},
    "squeezenet": {},
    "t5": {"sequence": 16, "decoder_sequence": 8},
    "translated": {},
}
OTHERS = sorted(set(models.names()) - set(CHEAP))


def slow_of(names: Iterable[str], *alike: str) -> list[Any]:
    """Names of which some are of slow tests: other sizes of what another name is of, or other cells of the same network."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in alike)) for name in names]


def outputs(result: object) -> list[torch.Tensor]:
    tensors = [result] if isinstance(result, torch.Tensor) else list(result)
    assert all(isinstance(tensor, torch.Tensor) for tensor in tensors)
    return tensors


@pytest.mark.parametrize("name", slow_of(CHEAP, "resnet50", "darts"))
def test_eval_outputs_are_finite_and_depend_on_the_input(name: str) -> None:
    model = models.load(name, 1, **CHEAP[name])
    with torch.no_grad():
        first = outputs(model.module(*model.inputs))
        second = outputs(model.module(*model.fresh_inputs(7)))
    for a, b in zip(first, second, strict=True):
        assert a.isfinite().all()
        assert (a - b).norm() > 1e-2 * a.norm()
        assert 1e-4 < a.abs().max() < 1e4


@torch.no_grad()
def rounding_and_effect(name: str) -> tuple[float, float]:
    """Of a small form's outputs, by the norm: what bf16 changes at most, and what other inputs change at least."""
    model = models.load(name, 1, **CHEAP[name])
    expected = outputs(model.module(*model.inputs))
    others = outputs(model.module(*model.fresh_inputs(7)))
    halved = models.place(model, device="cpu", precision="bf16", layout="contiguous")
    rounded = outputs(halved.module(*halved.inputs))
    errors, effects = ([relative_error(o, e) for o, e in zip(x, expected, strict=True)] for x in (rounded, others))
    return max(errors), min(effects)


@pytest.mark.parametrize("name", TODAY)
@pytest.mark.slow
def test_rounding_in_bf16_is_far_below_what_inputs_do(name: str) -> None:
    """Else no wrong execution could be told from rounding."""
    rounding, effect = rounding_and_effect(name)
    assert rounding < 0.2 * effect


@torch.no_grad()
@pytest.mark.slow
def test_each_damped_branch_of_deeplab_shows_beside_rounding() -> None:
    rounding, _ = rounding_and_effect("deeplabv3_resnet50")
    model = models.load("deeplabv3_resnet50", 1, size="small")
    expected = model.module(*model.inputs)
    branches = [block.bn3 for block in model.module.modules() if isinstance(block, Bottleneck)]
    pooling = [branch for branch in model.module.modules() if isinstance(branch, ASPPPooling)]
    assert len(branches) == 16 and len(pooling) == 1
    for branch in (*branches[::5], *pooling):
        hook = branch.register_forward_hook(lambda _module, _inputs, output: torch.zeros_like(output))
        assert relative_error(model.module(*model.inputs), expected) > 2 * rounding
        hook.remove()


@torch.no_grad()
def test_deeplabs_mean_over_the_image_enlarges_no_rounding() -> None:
    """Its batch norm sees one value an image and channel, of which two images give no deviation to divide by."""
    model = models.load("deeplabv3_resnet50", 1, size="small")
    (pooling,) = (branch for branch in model.module.modules() if isinstance(branch, ASPPPooling))
    features = model.module.deeplab.backbone(*model.inputs)["out"]
    expected = pooling(features)
    assert relative_error(pooling.bfloat16()(features.bfloat16()), expected) < torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("name", slow_of(sorted(set(CHEAP) - {"bert", "t5"}), "resnet50", "resnet50_cifar10", "amoebanet"))
def test_train_forms_run_and_have_gradients(name: str) -> None:
    heads = {"amoebanet": 2, "darts": 2, "googlenet": 3, "inception_v3": 2}
    heads |= {"clip_vit_b32": 3, "deeplabv3_resnet50": 2, "retinanet_heads": 2}
    on_cpu = name.endswith("cifar10") or name in ("googlenet", "squeezenet", "resnet18", "translated")
    model = models.load(name, 2, training=True, device="cpu" if on_cpu else "meta", **CHEAP[name])
    assert all(module.training for module in model.module.modules())
    results = outputs(model.module(*model.inputs))
    assert len(results) == heads.get(name, 1)
    sum(result.sum() for result in results).backward()
    parameters = model.module.named_parameters()
    unused = [key for key, parameter in parameters if parameter.requires_grad and parameter.grad is None]
    assert not unused


@pytest.mark.parametrize("name", slow_of([*OTHERS, "bert", "t5"], "nasnet_large", "efficientnet_b5", "resnet101"))
def test_train_forms_of_the_large_ones_run(name: str) -> None:
    model = models.load(name, 2, training=True, device="meta")
    assert model.module.training
    assert outputs(model.module(*model.inputs))[0].shape[0] == 2


@pytest.mark.parametrize(
    "name",
    [
        *("bert", "efficientnet_b0", "t5"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("amoebanet", "darts", "gpt2", "mobilenet_v2")),
    ],
)
def test_export(name: str) -> None:
    """One of each kind; tests of the systems capture others."""
    model = models.load(name, 1, device="meta", **CHEAP.get(name, {"sequence": 16}))
    with torch.no_grad():
        program = torch.export.export(model.module, model.inputs, strict=False)
    # Either would be a wait of the host for the device, which a CUDA Graph cannot hold.
    host = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert not [target for target in host if "_local_scalar_dense" in target or "lift_fresh" in target]


def _timm_in_our_order(module: nn.Module) -> list[torch.Tensor]:
    """The state of timm's NASNet in the order of ours: in a cell, the squeeze of its input comes before the other."""
    values: list[torch.Tensor] = []
    for child in module.children():
        parts = dict(child.named_children())
        if "conv_prev_1x1" in parts:
            parts = {"conv_1x1": parts.pop("conv_1x1")} | parts
        for part in parts.values() if parts else [child]:
            values += part.state_dict().values()
    return values


def _features_of_the_large_net(net: NASNet, x: torch.Tensor) -> torch.Tensor:
    """The last cell's output, if the cell after a reduction looked past it as in the large NASNet-A (TF-slim's
    skip_reduction_layer_input, 1 for the large net, 0 for the mobile one)."""
    first = net.convolution(x)
    states = [first, net.stem_0(first, first)]
    states.append(net.stem_1(states[1], first))
    skipped = None
    for cell in net.cells:
        before = states[-2] if skipped is None else skipped
        skipped = states[-2] if cell.blocks is REDUCTION else None
        states.append(cell(states[-1], before))
    return F.relu(states[-1])


def test_nasnets_cells_are_timms() -> None:
    """At 67 pixels every reduction falls on an odd size, where symmetric padding is TensorFlow's SAME."""
    torch.manual_seed(0)
    ours = NASNet(cells=6, filters=8, stem=16, size=67).eval()
    theirs = timm.models.nasnet.NASNetALarge(stem_size=16, num_features=24 * 8, pad_type="").eval()
    for mine, value in zip(ours.state_dict().values(), _timm_in_our_order(theirs), strict=True):
        if value.is_floating_point():
            value.uniform_(0.5, 1.5) if value.dim() == 1 else value.normal_(std=value[0].numel() ** -0.5)
        mine.copy_(value)
    x = torch.randn(2, 3, 67, 67)
    with torch.no_grad():
        torch.testing.assert_close(_features_of_the_large_net(ours, x), theirs.forward_features(x))


@pytest.mark.parametrize("kernel", [3, 5, 7])
def test_a_stride_on_an_even_size_pads_as_the_original_does(kernel: int) -> None:
    """Pad one at the top left, convolve symmetrically, drop the first row and column: as NASNet's PyTorch port does."""
    separable = Separable(4, 4, kernel, stride=2, uneven=True).eval()
    convolution = separable.depthwise_1
    x = torch.randn(1, 4, 14, 14)
    port = F.conv2d(F.pad(x, (1, 0, 1, 0)), convolution.weight, stride=2, padding=kernel // 2, groups=4)[:, :, 1:, 1:]
    torch.testing.assert_close(convolution(separable.pad(x)), port)


@pytest.mark.parametrize("seed", range(5))
def test_random_wiring_is_a_connected_dag(seed: int) -> None:
    predecessors = wiring(NODES, seed)
    graph = nx.DiGraph((p, node) for node, before in enumerate(predecessors) for p in before)
    assert nx.is_directed_acyclic_graph(graph)
    assert nx.is_weakly_connected(graph)
    assert graph.number_of_nodes() == NODES
    assert graph.number_of_edges() == 2 * NODES
    assert wiring(NODES, seed) == predecessors


@cache
def decoder(name: str) -> models.Model:
    """Of ten tokens. To draw the weights takes most of a test's time."""
    return models.load(name, 2, **({"sequence": 10} if name == "gpt2" else {"sequence": 6, "decoder_sequence": 10}))


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5"])
def test_attention_without_a_mask_is_transformers_own(name: str) -> None:
    """Against eager attention, which makes its (causal) masks itself."""
    model = models.load(name, 2, sequence=12, layers=2) if name == "bert" else decoder(name)
    arguments = dict(zip(("input_ids", "decoder_input_ids"), model.inputs, strict=False))
    network = getattr(model.module, name)
    kind = network.config._attn_implementation
    assert kind != "eager"
    with torch.no_grad():
        ours = outputs(model.module(*model.inputs))
        network.set_attn_implementation("eager")
        theirs = network(**arguments, use_cache=False) if name != "bert" else network(**arguments)
    network.set_attn_implementation(kind)
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_decoders_do_not_see_what_comes_later(name: str) -> None:
    model = decoder(name)
    *encoder, tokens = model.inputs
    changed = tokens.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % 1000
    with torch.no_grad():
        before, after = model.module(*encoder, tokens), model.module(*encoder, changed)
    torch.testing.assert_close(before[:, :6], after[:, :6], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(before[:, 6:], after[:, 6:], rtol=1e-2)
