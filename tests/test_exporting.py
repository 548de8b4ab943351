"""What torch.export refuses is told in words of what the module does."""

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from modules import Lambda
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

import systems
import systems.nimble
from systems.base import Unsupported
from systems.scheduling.graph.capture import capture


class Cache:
    """What torch.export knows no parts of."""


@torch.library.custom_op("opweave_tests::doubled", mutates_args=("x",))
def doubled(x: Tensor) -> None:
    x.mul_(2)


def doubles(x: Tensor) -> Tensor:
    y = x + 1
    doubled(y)
    return y


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (
            lambda x: (x + 1, Cache()),
            r"^torch\.export cannot capture it: its output holds a Cache, which .*: return tensors$",
        ),
        (
            lambda x: x if x.sum() > 0 else -x,
            r"^torch\.export cannot capture it: it chooses by its data what to run: Guard.*",
        ),
        (lambda x: flex_attention(x, x, x), r"^it runs flex_attention, which holds operators of its own, .*"),
        (doubles, r"^opweave_tests\.doubled\.default changes its argument.*"),
    ],
)
def test_a_refusal_says_what_the_module_does(act: Callable[[Tensor], Any], says: str) -> None:
    with pytest.raises(Unsupported, match=says):
        capture(Lambda(act).eval(), (torch.randn(1, 2, 16, 8),))


def test_the_cache_of_a_decoder_is_refused_with_the_way_out() -> None:
    from transformers import GPT2Config, GPT2Model

    tiny = GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=99)
    nimble = systems.nimble.Nimble(GPT2Model(tiny).eval())
    ids = {"input_ids": torch.ones(1, 4, dtype=torch.long)}
    with pytest.raises(Unsupported, match=r"holds a DynamicCache, .*: set use_cache = False in its config$"):
        nimble.prepare(ids)
    nimble.config.use_cache = False
    nimble.prepare(ids)
    torch.testing.assert_close(nimble(**ids).last_hidden_state, nimble.module(**ids).last_hidden_state)
    nimble.close()


class Counting(nn.Module):
    """It counts in place, in a tensor that it holds somewhere."""

    def __init__(self, place: str):
        super().__init__()
        self.place, self.total, self.totals = place, torch.zeros(3), [{"a": torch.zeros(3)}]

    def forward(self, x: Tensor) -> Tensor:
        total = self.total if self.place == "total" else self.totals[0]["a"]
        total.add_(1)
        return x + total


@pytest.mark.parametrize("place", ["total", "totals.0.a"])
def test_a_tensor_that_is_written_in_place_is_named(place: str) -> None:
    module = nn.Sequential(Counting(place)).eval()
    says = rf"^it changes its own state in a forward pass \(0\.{place}\), which is no buffer$"
    with pytest.raises(Unsupported, match=says):
        systems.load("nimble").prepare(module, (torch.ones(3),))
    assert torch.equal(module(torch.ones(3)), torch.full((3,), 2.0))


def test_a_refusal_prints_no_graph(capsys: pytest.CaptureFixture[str]) -> None:
    import sys

    def act(x: Tensor) -> Tensor:
        print("own words", file=sys.stderr)
        return x if x.sum() > 0 else -x

    with pytest.raises(Unsupported):
        capture(Lambda(act).eval(), (torch.ones(3),))
    told = capsys.readouterr().err
    assert "own words" in told and "torch.ops.aten" not in told


@pytest.mark.parametrize(("draw", "whose"), [(random.random, "Python"), (lambda: float(numpy.random.rand()), "numpy")])
def test_random_numbers_that_a_capture_fixes_are_told(draw: Callable[[], float], whose: str) -> None:
    state = random.getstate()
    with pytest.warns(
        UserWarning, match=f"^the model draws from {whose}'s random numbers: those of its capture are used in each"
    ):
        capture(Lambda(lambda x: x * draw()).eval(), (torch.ones(3),))
    assert random.getstate() == state


@pytest.mark.parametrize("inputs", [None, 3, "ids"])
def test_what_are_no_inputs_is_told(inputs: object) -> None:
    with pytest.raises(TypeError, match=r"^example_inputs is a tensor, or a sequence of tensors"):
        systems.nimble.Nimble(nn.Linear(3, 3)).prepare(inputs)  # type: ignore[arg-type]


class Remembering(nn.Module):
    """Keeps something in each call by what it kept in the one before."""

    def __init__(self, act: Callable[["Remembering", Tensor], Tensor]):
        super().__init__()
        self.act, self.kept, self.number = act, None, 0
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self, x)


def sum_up(module: Any, x: Tensor) -> Tensor:
    module.kept = x * 2 if module.kept is None else module.kept + x
    return module.kept


def count(module: Any, x: Tensor) -> Tensor:
    module.number += 1
    return x * module.number


def fill(module: Any, x: Tensor) -> Tensor:
    """A table that is made once, a number that tells nothing, a random one, and a buffer that counts."""
    module.kept = torch.arange(3.0) if module.kept is None else module.kept
    module.number += 1
    module.total.add_(1)
    return x + module.kept + torch.rand(3) + module.total


@pytest.mark.parametrize(("act", "name"), [(sum_up, "kept"), (count, "number")])
def test_what_depends_on_the_calls_before_is_refused(act: Callable[[Any, Tensor], Tensor], name: str) -> None:
    module = Remembering(act).eval()
    with pytest.raises(Unsupported, match=f"^its answer depends on the calls before, by {name}, which is no buffer$"):
        capture(module, (torch.ones(3),))
    assert module.kept is None and module.number == 0


def test_what_is_kept_and_changes_no_answer_is_captured() -> None:
    module = Remembering(fill).eval()
    state = torch.get_rng_state()
    capture(module, (torch.ones(3),))
    assert torch.equal(torch.get_rng_state(), state)
    assert module.kept is None and module.number == 0 and not module.total.any()
    capture(Remembering(count).eval().to("meta"), (torch.ones(3, device="meta"),))  # which holds no numbers
