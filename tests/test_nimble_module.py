"""Nimble as a library: a module in the place of a module."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from transformers import BatchEncoding, BertConfig, BertModel

import models
from runners.measurements.correctness import relative_error
from systems.base import Unsupported
from systems.nimble import Nimble
from systems.registry import load
from systems.scheduling.execution.arena import Arena
from systems.scheduling.passes.rewriting import SWITCHES
from systems.weave.module import Axis, Weave

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
]


class Small(nn.Module):
    """Two branches, statistics, a random part, and an attribute of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 4)
        self.note = "mine"

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        return self.head(self.drop(y.relu() + y.sigmoid()).mean((2, 3)))


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param  # type: ignore[no-any-return]


def small(device: str) -> tuple[Small, Tensor]:
    torch.manual_seed(0)
    module = Small().to(device)
    module(torch.randn(4, 3, 8, 8, device=device))  # statistics
    return module.eval(), torch.randn(2, 3, 8, 8, device=device)


@torch.no_grad()
def close(fast: Nimble, module: nn.Module, x: Tensor) -> bool:
    return relative_error(fast(x), module(x)) < (1e-5 if x.device.type == "cpu" else 1e-2)


FUSED = {"fold_batch_norm": True, "fuse_elementwise": True}


@pytest.mark.parametrize("options", [{}, {"multi_stream": False}, FUSED])
def test_it_stands_in_the_place_of_its_module(options: dict, device: str) -> None:
    module, x = small(device)
    fast = Nimble(module, **options).prepare(x)
    assert close(fast, module, torch.randn_like(x))
    assert list(fast.state_dict()) == list(module.state_dict())
    assert [p.data_ptr() for p in fast.parameters()] == [p.data_ptr() for p in module.parameters()]
    assert dict(fast.named_buffers()).keys() == dict(module.named_buffers()).keys()
    assert fast.note == "mine" and fast.conv is module.conv and not fast.training
    with pytest.raises(AttributeError, match="nothing"):
        _ = fast.nothing
    around = nn.Sequential(fast, nn.Softmax(dim=1)).eval()
    assert close(around, nn.Sequential(module, nn.Softmax(dim=1)), x)  # type: ignore[arg-type]
    assert list(around.state_dict()) == [f"0.{name}" for name in module.state_dict()]
    fast.close()


@pytest.mark.parametrize("options", [{}, FUSED])
def test_new_weights_in_place_are_used_by_the_next_call(options: dict, device: str) -> None:
    module, x = small(device)
    fast, other = Nimble(module, **options).prepare(x), Small().to(device)
    before = fast(x)
    fast.load_state_dict(other.state_dict())
    assert close(fast, module, x) and relative_error(fast(x), before) > 1e-2
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.1)
    assert close(fast, module, x)
    fast.close()


def test_preparing_changes_nothing(device: str) -> None:
    module, x = small(device)
    module.train()
    module.drop.eval()  # a mixture, which is to be there again
    state = copy.deepcopy(module.state_dict())
    forms = [m.training for m in module.modules()]
    random_states = torch.get_rng_state(), torch.cuda.get_rng_state() if device == "cuda" else None
    fast = Nimble(module, **FUSED).prepare(x)
    assert torch.equal(torch.get_rng_state(), random_states[0])
    assert device == "cpu" or torch.equal(torch.cuda.get_rng_state(), random_states[1])  # type: ignore[arg-type]
    assert [m.training for m in module.modules()] == forms
    assert all(torch.equal(v, state[k]) for k, v in module.state_dict().items())
    assert all(p.grad is None for p in module.parameters())
    fast.close()


def test_what_was_not_prepared_is_refused(device: str) -> None:
    module, x = small(device)
    fast = Nimble(module)
    with pytest.raises(ValueError, match="prepared for nothing"):
        fast(x)
    fast.prepare(x)
    for wrong in ((x[:1],), (x.double(),), (x.to("meta"),), (x, x), (), (3,)):
        with pytest.raises(ValueError, match=r"prepared for float32\[2, 3, 8, 8\] on"):
            fast(*wrong)
    fast.train()
    assert module.training
    with pytest.raises(RuntimeError, match="call eval"):
        fast(x)
    fast.eval()
    assert close(fast, module, x)
    with pytest.raises(TypeError, match="tensor"):
        fast.prepare([3])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="training=True alone"):
        fast.prepare(x, loss=nn.functional.cross_entropy)
    fast.close()


def test_several_inputs_are_one_argument_of_prepare() -> None:
    """A second one is no training: a number of 0 would be left out without a word."""
    module, x = small("cpu")
    for second in (x, torch.tensor(0.0), None):
        with pytest.raises(TypeError, match=r"a tuple: prepare\(\(x, y\)\)"):
            Nimble(module).prepare(x, second)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="y: inputs by name are one argument, a mapping"):
        Nimble(module).prepare(x, y=x)


def test_several_shapes_live_side_by_side(device: str) -> None:
    module, _ = small(device)
    shapes = [torch.randn(b, 3, 8, 8, device=device) for b in (4, 1, 2)]
    fast = Nimble(module)
    for shape in shapes:
        fast.prepare(shape)
    for shape in (*shapes, *reversed(shapes)):
        assert close(fast, module, torch.randn_like(shape))
    if device == "cuda":
        assert len(fast.arena.ranges) == 1  # the largest came first
    fast.prepare(shapes[0])  # again
    assert close(fast, module, shapes[0]) and len(fast.prepared) == 3
    fast.close()


@pytest.mark.slow
def test_inputs_may_go_by_name_as_a_tokenizer_gives_them(device: str) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    bert = BertModel(BertConfig(**sizes, vocab_size=100)).eval().to(device)

    def drawn(batch: int) -> BatchEncoding:
        mask = torch.ones(batch, 8, dtype=torch.long, device=device)
        mask[:, 5:] = 0
        return BatchEncoding({"input_ids": torch.randint(100, (batch, 8), device=device), "attention_mask": mask})

    fast = Weave(bert, [Axis({0: 0, 1: 0}, {0: 0, 1: 0})], budget_s=0.0)
    fast.prepare({name: drawn(2)[name] for name in ("attention_mask", "input_ids")}).prepare(drawn(2)).prepare(drawn(4))
    assert len(fast.prepared) == 2 and fast.state_dict().keys() == bert.state_dict().keys()
    for batch in (4, 2, 3):
        x = drawn(batch)
        with torch.no_grad():
            expected = bert(**x)
        for answer in (fast(**x), fast(attention_mask=x["attention_mask"], input_ids=x["input_ids"])):
            assert type(answer) is type(expected)
            torch.testing.assert_close(answer.last_hidden_state, expected.last_hidden_state, rtol=1e-4, atol=1e-5)
    ids, mask = x["input_ids"], x["attention_mask"]
    ready = r"prepared for attention_mask: int64\[2, 8\] on"
    for named in ({"input_ids": ids}, dict(x) | {"token_type_ids": mask}, {"ids": ids, "mask": mask}):
        with pytest.raises(ValueError, match=ready):
            fast(**named)
    with pytest.raises(ValueError, match=ready):
        fast(mask, ids)
    with pytest.raises(TypeError, match="attention_mask goes by name and others by position"):
        fast(ids, attention_mask=mask)
    with pytest.raises(TypeError, match="tensor"):
        fast.prepare({"input_ids": 3})
    with pytest.raises(TypeError, match="inputs of training go by position"):
        fast.prepare(dict(x), training=True)
    with pytest.raises(Unsupported, match=r"its inputs go by name: models.by_name.ByName\(module, names\)"):
        load("nimble").prepare(bert, dict(x))  # type: ignore[arg-type]
    fast.otherwise = "module"
    with torch.no_grad():
        assert torch.equal(fast(ids, attention_mask=mask).last_hidden_state, bert(ids, mask).last_hidden_state)
    fast.close()


def test_a_failed_prepare_leaves_what_was_prepared(device: str) -> None:
    class Breaking(Small):
        is_broken = False

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.reshape(7, -1) if self.is_broken else x)

    module, x = Breaking().to(device).eval(), torch.randn(2, 3, 8, 8, device=device)
    fast = Nimble(module).prepare(x)
    module.is_broken = True
    with pytest.raises(Unsupported, match="cannot capture"):
        fast.prepare(x)
    module.is_broken = False
    assert close(fast, module, x)
    fast.close()


def test_weights_that_moved_are_noticed(device: str) -> None:
    module, x = small(device)
    fast = Nimble(module).prepare(x)
    module.conv.weight.data = module.conv.weight.data.clone()
    with pytest.raises(RuntimeError, match="prepare again"):
        fast(x)
    assert close(fast.prepare(x), module, x)
    fast.close()


def _assigned(module: Small) -> None:
    module.load_state_dict({name: t + 1 for name, t in module.state_dict().items()}, assign=True)


CHANGES: dict[str, Callable[[Small], object]] = {
    "conv.weight": _assigned,
    "head.bias": lambda module: setattr(module.head, "bias", nn.Parameter(torch.ones(4))),
    "norm.running_mean": lambda module: setattr(module.norm, "running_mean", torch.ones(8)),
    "head": lambda module: setattr(module, "head", nn.Linear(8, 4)),
    "head.weight": lambda module: prune.l1_unstructured(module.head, "weight", 0.5),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_assigned_anew_is_noticed(name: str) -> None:
    """The schedule has the tensor that was there before."""
    module, x = small("cpu")
    fast = Nimble(module).prepare(x)
    with torch.no_grad():
        CHANGES[name](module)
    with pytest.raises(RuntimeError, match=rf"^{re.escape(name)} of the module is another since prepare.*: prepare again"):
        fast(x)
    assert close(fast.prepare(x), module, x)
    fast.close()


def test_the_form_is_that_of_the_module_itself() -> None:
    """Also where that changes without its wrapper."""
    module, x = small("cpu")
    fast = Nimble(module.train()).prepare(x)
    assert fast.training
    module.eval()
    assert not fast.training and close(fast, module, x)
    module.train()
    with pytest.raises(RuntimeError, match=r"call eval\(\) first"):
        fast(x)
    fast.close()


def test_an_arena_gives_the_smallest_range_that_is_large_enough() -> None:
    arena, cpu = Arena(), torch.device("cpu")
    large = arena.take(100, cpu)
    assert arena.take(40, cpu) is large and arena.size == 100
    assert (larger := arena.take(101, cpu)) is not large and arena.size == 201
    assert arena.take(100, cpu) is large and arena.take(101, cpu) is larger
    roomy = Arena(room=1.5)
    assert roomy.take(99, cpu).numel() == 149 and roomy.take(149, cpu) is roomy.ranges[0] and len(roomy.ranges) == 1
    with pytest.raises(ValueError, match=r"0\.5 times"):
        Arena(room=0.5)


def test_an_arena_takes_no_more_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its room does not fit, a range has what was asked for; where that does not fit, it raises."""
    empty = torch.empty

    def limited(size: int, **options: Any) -> Tensor:
        if size > 150:
            raise torch.OutOfMemoryError("out of memory")
        return empty(size, **options)

    monkeypatch.setattr(torch, "empty", limited)
    arena = Arena(room=2.0)
    assert arena.take(100, torch.device("cpu")).numel() == 100
    with pytest.raises(torch.OutOfMemoryError):
        arena.take(151, torch.device("cpu"))


@pytest.mark.parametrize(
    "model", [pytest.param(model, marks=pytest.mark.slow) for model in ("mobilenet_v2_cifar10", "googlenet")]
)
def test_real_models_with_every_pass(model: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chosen by real measurements, so that what is chosen differs from run to run; the outputs do not."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # its rounding would hide a wrong kernel
    loaded = models.load(model, 1, device=device)
    fast = Nimble(loaded.module, **dict.fromkeys(SWITCHES, True)).prepare(loaded.inputs)
    decisions = next(iter(fast.prepared.values())).schedule.decisions  # type: ignore[union-attr]
    assert sum(d.count for d in decisions if d.kind == "fold_batch_norm") > 20
    assert {d.kind for d in decisions} >= {"fold_batch_norm", "select_kernels", "select_products"}
    assert all(d.milliseconds[d.chosen] > 0 for d in decisions if d.milliseconds)  # type: ignore[operator]
    inputs = loaded.fresh_inputs(7)
    with torch.no_grad():
        assert relative_error(fast(*inputs), loaded.module(*inputs)) < 1e-4
    fast.close()
