"""The networks of today against other ways to compute them: the library's own masks and caches, loops over fields."""

from __future__ import annotations

import itertools
import sys

import pytest
import torch
from torch.nn import functional
from torch.utils._pytree import tree_leaves
from transformers.cache_utils import DynamicCache

import models
import systems
from models import loading, registry
from models.recommenders import DLRM, DeepFM
from runners.measurements.correctness import relative_error
from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.part import part

SMALL = {"size": "small"}


def test_small_forms_are_options_and_others_are_one_line() -> None:
    with pytest.raises(models.BadModel, match=r"model.size=tiny is not one of full, small"):
        models.load("swin_t", 1, size="tiny")
    with pytest.raises(models.BadModel, match=r"option context of model gptj_6b must be at most 2048, not 4096"):
        models.load("gptj_6b_decode", 1, size="small", context=4096)


def test_category_ids_stay_within_their_own_tables() -> None:
    rows = (1, 3, 50)
    described = registry.Input((2, 3), rows)
    ids = described.draw(400, torch.Generator().manual_seed(0))
    assert ids.shape == (400, 2, 3) and ids.dtype == torch.int64 and int(ids.min()) == 0
    assert tuple(int(column.max()) + 1 for column in ids.unbind(-1)) == rows
    assert not torch.equal(ids[:, 0], ids[:, 1])


@pytest.mark.parametrize("name", ["dlrm", "gptj_6b_decode"])
def test_what_is_made_in_place_is_the_same_each_time_and_leaves_the_random_state_alone(name: str) -> None:
    state = torch.random.get_rng_state()
    first, second = models.load(name, 2, **SMALL), models.load(name, 2, **SMALL)
    assert torch.equal(state, torch.random.get_rng_state())
    tensors = [[*model.module.parameters(), *model.module.buffers()] for model in (first, second)]
    assert len(tensors[0]) == len(tensors[1]) and all(map(torch.equal, *tensors))


def test_what_depends_on_the_batch_or_the_device_is_not_built_ahead() -> None:
    for name in ("gptj_6b_decode", "dlrm"):
        models.build_ahead("squeezenet")
        models.build_ahead(name, size="small")
        assert not loading._ahead


def test_the_library_of_what_is_not_built_ahead_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers.models", None)
    with pytest.raises(models.BadModel, match="needs diffusers"):
        models.build_ahead("sd15_unet", size="small")


def test_attention_of_clip_and_whisper_is_the_librarys_own() -> None:
    """Against eager attention, for which the library makes the masks."""
    for name, inner in (("clip_vit_b32", "clip"), ("whisper_small", "encoder"), ("qwen3_moe", "mixture")):
        model = models.load(name, 2, **SMALL)
        with torch.no_grad():
            ours = model.module(*model.inputs)
            getattr(model.module, inner).set_attn_implementation("eager")
            theirs = model.module(*model.inputs)
        pairs = zip(*([x] if isinstance(x, torch.Tensor) else x for x in (ours, theirs)), strict=True)
        assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in pairs), name


@pytest.mark.parametrize("name", ["gptj_6b", "qwen3_moe"])
def test_no_token_sees_what_comes_later(name: str) -> None:
    model = models.load(name, 1, sequence=10, **SMALL)
    (tokens,) = model.inputs
    changed = tokens.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % 1000
    with torch.no_grad():
        before, after = model.module(tokens), model.module(changed)
    torch.testing.assert_close(before[:, :6], after[:, :6], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(before[:, 6:], after[:, 6:], rtol=1e-2)


def test_a_decode_step_gives_the_logits_of_the_whole_prompt() -> None:
    """Its cache filled by the library's own, which grows by a token in each step."""
    context, batch = 9, 2
    step = models.load("gptj_6b_decode", batch, context=context, **SMALL).module
    tokens = models.load("gptj_6b", batch, sequence=context, **SMALL).inputs[0]
    cache = DynamicCache()
    with torch.no_grad():
        step.gptj(tokens[:, :-1], past_key_values=cache, use_cache=True)
        expected = step.gptj(tokens, use_cache=False).logits[:, -1:]
        assert not torch.allclose(step(tokens[:, -1:]), expected, rtol=1e-2)  # its cache is random
        for layer, filled in enumerate(cache.layers):
            for kind in ("keys", "values"):
                step.cache.get_buffer(f"{kind}_{layer}")[:, :, :-1] = getattr(filled, kind)
        for _ in range(2):  # the second writes the same again
            torch.testing.assert_close(step(tokens[:, -1:]), expected, rtol=1e-4, atol=1e-5)
        step.cache.position.fill_(4)  # what lies beyond is not read
        expected = step.gptj(tokens[:, :5], use_cache=False).logits[:, -1:]
        torch.testing.assert_close(step(tokens[:, 4:5]), expected, rtol=1e-4, atol=1e-5)


def test_dlrm_reads_bags_and_multiplies_each_pair_once() -> None:
    torch.manual_seed(0)
    rows = (4, 7, 5)
    net = DLRM(rows).eval()
    dense, ids = torch.randn(3, 13), torch.stack([torch.randint(n, (3, 2)) for n in rows], -1)  # [B, hot, fields]
    with torch.no_grad():
        bottom = net.bottom(dense)
        sums = [bag.weight[ids[:, 0, i]] + bag.weight[ids[:, 1, i]] for i, bag in enumerate(net.bags)]
        vectors = [bottom, *sums]
        products = [(vectors[i] * vectors[j]).sum(1) for i in range(len(vectors)) for j in range(i)]
        expected = torch.sigmoid(net.top(torch.cat([bottom, torch.stack(products, 1)], 1)))
        torch.testing.assert_close(net(dense, ids), expected)


def test_deepfm_is_a_sum_over_pairs_beside_a_perceptron() -> None:
    torch.manual_seed(0)
    rows = (4, 7, 5)
    net = DeepFM(rows).eval()
    dense, ids = torch.randn(3, 13), torch.stack([torch.randint(n, (3, 1)) for n in rows], -1)
    with torch.no_grad():
        fields = [dense[:, i : i + 1] * net.dense[i] for i in range(13)]
        fields += [table.weight[ids[:, 0, i]] for i, table in enumerate(net.embeddings)]
        pairs = sum((a * b).sum(1, keepdim=True) for a, b in itertools.combinations(fields, 2))
        linear = functional.linear(dense, net.dense_linear.weight, net.dense_linear.bias)
        linear = linear + sum(table.weight[ids[:, 0, i]] for i, table in enumerate(net.linear))
        expected = torch.sigmoid(linear + pairs + net.deep(torch.cat(fields, 1)))
        torch.testing.assert_close(net(dense, ids), expected)


def test_no_part_of_a_mixture_of_experts_reads_what_nobody_wrote() -> None:
    """It inverts a permutation in memory that it takes uninitialized, and reads by that. Measured alone, the permutation is
    zeros, so that most of the memory stays as it was: here the largest number, which is no index."""
    model = models.load("qwen3_moe", 1, sequence=4, **SMALL)
    program = capture(model.module, model.inputs)
    (first, *_) = [v for v, o in enumerate(program.graph.operators) if o.name == "empty_like"]
    (put,) = [v for v in program.graph.successors[first] if program.graph.operators[v].name == "index_put"]
    (read,) = [v for v in program.graph.successors[put] if program.graph.operators[v].name == "index"]
    try:
        torch.use_deterministic_algorithms(True)
        for operators in ([first, put, read], [put, read]):
            measured_part = part(program, operators)
            (out,) = measured_part.run(measured_part.examples)
            assert out.isfinite().all()
    finally:
        torch.use_deterministic_algorithms(False)


ON_CPU = ("nimble_fused", "opara_fused", "ios_fused")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", sorted(n for n in models.names() if "full" in str(registry.find(n).options({}).get("size")))
)
@pytest.mark.parametrize("system", ON_CPU)
def test_every_network_agrees_with_eager_under_every_scheduler(name: str, system: str) -> None:
    model = models.load(name, 1, **SMALL)
    prepared = systems.load(system).prepare(model.module, model.inputs)
    inputs = model.fresh_inputs(3)
    with torch.no_grad():
        pairs = zip(tree_leaves(prepared(*inputs)), tree_leaves(model.module(*inputs)), strict=True)
    assert all(relative_error(out, expected) < 1e-4 for out, expected in pairs)
    prepared.close()
