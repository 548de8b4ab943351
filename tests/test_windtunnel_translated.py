"""model=translated: a translated pipeline of random structure, for speed."""

import pytest
import torch

import models
import systems
from systems.scheduling.graph.capture import capture

SMALL = {"fields": 5, "categories": 20, "trees": 7, "leaves": 8, "rank": 3}


@pytest.mark.parametrize("form", ["hard", "soft"])
@pytest.mark.parametrize("system", ["nimble", "opara", "sequential"])
def test_schedulers_run_it(form: str, system: str) -> None:
    model = models.load("translated", 6, form=form, **SMALL)
    prepared = systems.load(system).prepare(model.module, model.inputs)
    for inputs in (model.inputs, model.fresh_inputs(3)):
        torch.testing.assert_close(prepared(*inputs), model.module(*inputs).detach(), atol=1e-5, rtol=1e-5)
    prepared.close()


@pytest.mark.parametrize("form", ["hard", "soft"])
def test_onnx_runtime_runs_it(form: str) -> None:
    for library in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(library, reason="pip install '.[onnx]'")
    model = models.load("translated", 6, form=form, **SMALL)
    prepared = systems.load("onnxruntime").prepare(model.module, model.inputs)
    for inputs in (model.inputs, model.fresh_inputs(3)):
        torch.testing.assert_close(prepared(*inputs), model.module(*inputs).detach(), atol=1e-5, rtol=1e-5)
    prepared.close()


def test_every_field_is_looked_up_beside_the_others() -> None:
    model = models.load("translated", 2, **SMALL)
    assert capture(model.module, model.inputs).graph.width >= 5


def test_each_row_falls_into_one_leaf_of_each_tree() -> None:
    hard, soft = (models.load("translated", 6, form=form, **SMALL) for form in ("hard", "soft"))
    leaves = hard.module[:2](*hard.inputs)  # type: ignore[index]
    assert leaves.shape == (6, 56) and torch.equal(leaves.view(6, 7, 8).sum(2), torch.ones(6, 7))
    near = soft.module[:2](*hard.inputs)  # type: ignore[index]
    # A soft tree's most active leaf is the one that the row falls into.
    assert torch.equal(near.view(6, 7, 8).argmax(2), leaves.view(6, 7, 8).argmax(2))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"leaves": 48}, "option leaves of model translated must be a power of two, at least 2, not 48"),
        ({"form": "firm"}, r"model\.form=firm is not one of hard, soft"),
    ],
)
def test_wrong_options_are_one_line(options: dict[str, int], words: str) -> None:
    with pytest.raises(models.BadModel, match=words):
        models.load("translated", 1, **options)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("system", ["cuda_graph", "nimble", "torch_compile"])
def test_it_runs_on_a_gpu(system: str) -> None:
    model = models.load("translated", 64, device="cuda")
    prepared = systems.load(system).prepare(model.module, model.inputs)
    torch.testing.assert_close(prepared(*model.inputs), model.module(*model.inputs).detach(), atol=1e-4, rtol=1e-4)
    prepared.close()
