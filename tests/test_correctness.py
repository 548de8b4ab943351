"""What the check must catch, what it must let pass, and when it must say that it could see nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from made_records import record
from modules import Lambda
from torch import Tensor, nn

import models
from models.calibration import calibrate
from results.calls import Correctness
from results.cell import Cell, Conditions, choose
from runners.cell import reference
from runners.cell.measuring import measured
from runners.cell.session import Session
from runners.measurements.correctness import NEAR, accepted, measure
from systems.scheduling.graph.capture import capture
from systems.tolerance import FLOOR, MULTIPLE, distance
from systems.weave.reference import Reference

GENERATOR = torch.Generator().manual_seed(0)
WEIGHT = torch.randn(64, 64, generator=GENERATOR) / 8


def draws(*shape: int, count: int = 3) -> list[tuple[Tensor, ...]]:
    return [(torch.randn(shape, generator=torch.Generator().manual_seed(i)),) for i in range(count)]


class Product(nn.Module):
    """x @ weight, in a form of its own."""

    def __init__(self, form: Callable[[Tensor], Any] = lambda y: y):
        super().__init__()
        self.weight, self.form = nn.Parameter(WEIGHT.clone(), requires_grad=False), form

    def forward(self, x: Tensor) -> Any:
        return self.form(x @ self.weight)


def judged(
    form: Callable[[Tensor], Any], mutant: Callable[[Any], Any], rows: int = 64, precision: str = "fp32"
) -> Correctness:
    """The verdict on a system that makes `mutant` of eager's output."""
    module = Product(form)
    return measure(module, lambda x: mutant(module(x)), draws(rows, 64), precision)


def with_element(y: Tensor, at: tuple[Any, ...], change: Callable[[Tensor], Tensor]) -> Tensor:
    y = y.clone()
    y[at] = change(y[at])
    return y


def plain(y: Tensor) -> Tensor:
    return y


def pair(y: Tensor) -> dict[str, Any]:
    return {"scores": y, "best": [y.argmax(1), 7, "text", None]}


# The form of eager's output, what a wrong execution makes of it, and a word of the reason.
MUTANTS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Any], str]] = {
    "no imaginary part": (lambda y: torch.complex(y, y), lambda y: y.real, "complex64"),
    "an imaginary part of zero": (lambda y: torch.complex(y, y), lambda y: torch.complex(y.real, 0 * y.imag), "exceeds"),
    "no output": (pair, lambda y: None, "the type of output is NoneType"),
    "no tensors": (pair, lambda y: {"best": []}, "lacks"),
    "a tensor less": (lambda y: (y, 2 * y), lambda y: y[:1], "lacks"),
    "a tensor more": (lambda y: (y, 2 * y), lambda y: (*y, y[0]), "has output[2]"),
    "a list for a tuple": (lambda y: (y, 2 * y), list, "the type of output is list"),
    "two tensors in another order": (lambda y: (y, 2 * y), lambda y: y[::-1], "exceeds"),
    "another key": (pair, lambda y: {"score": y["scores"], "best": y["best"]}, "lacks"),
    "another number": (pair, lambda y: y | {"best": [y["best"][0], 8, "text", None]}, "is 8, eager's is 7"),
    "another text": (pair, lambda y: y | {"best": [y["best"][0], 7, "test", None]}, "'test'"),
    "a truth value for a number": (lambda y: (y, 1), lambda y: (y[0], True), "the type of output[1] is bool"),
    "another whole number": (lambda y: (y, y.argmax(1)), lambda y: (y[0], with_element(y[1], (3,), torch.neg)), "exceeds"),
    "another type": (plain, lambda y: y.double(), "float64"),
    "another shape": (plain, lambda y: y[None], "shape"),
    "a number for a tensor": (lambda y: y.sum(), lambda y: y.item(), "type of output"),
    "not a number": (plain, lambda y: with_element(y, (0, 0), lambda e: e * torch.nan), "not finite"),
    "not a number, in a number": (lambda y: (y, y.sum().item()), lambda y: (y[0], float("nan")), "not finite"),
    "all zero": (plain, torch.zeros_like, "exceeds"),
    "one element of 4096 off by half": (plain, lambda y: with_element(y, (5, 5), lambda e: 1.5 * e), "exceeds"),
    "half a percent of scale": (plain, lambda y: y * 1.005, "exceeds"),
    "a thousandth of a percent of scale": (plain, lambda y: y * 1.00001, "exceeds"),
    "transposed": (plain, lambda y: y.T, "exceeds"),
    "a small tensor beside a large one": (lambda y: (y * 1e6, y[0]), lambda y: (y[0], y[1] * 1.01), "exceeds"),
    "an ignored input under a bias": (lambda y: y + 1e3, lambda y: 0 * y + 1e3, "exceeds"),
    "a number that is off": (lambda y: (y, y.square().sum().item()), lambda y: (y[0], y[1] * 1.001), "exceeds"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_execution_is_incorrect(name: str) -> None:
    form, mutant, why = MUTANTS[name]
    right, wrong = judged(form, lambda y: y), judged(form, mutant)
    assert right.is_correct and right.equals_eager and right.reference == "fp64" and right.inputs == 3, right.reason
    assert not wrong.is_correct and wrong.is_checked and why in (wrong.reason or ""), wrong.reason


def test_one_row_of_20000_that_is_zero_is_incorrect() -> None:
    part = judged(plain, lambda y: with_element(y, (7,), torch.zeros_like), rows=20_000)
    assert part.relative_error is not None and part.relative_error < 0.01 and not part.is_correct


def test_one_element_of_a_million_that_is_off_is_incorrect_by_itself() -> None:
    part = judged(plain, lambda y: with_element(y, (7, 7), lambda e: e + 1e-3), rows=20_000)
    assert part.relative_error is not None and part.tolerance is not None and part.relative_error < part.tolerance
    assert not part.is_correct and "of the largest element" in (part.reason or "")


class Router(nn.Module):
    """Each row through the expert of two that scores higher; row 7 of LEVEL scores level with both, but for rounding."""

    def __init__(self, other_row: int | None = None) -> None:
        super().__init__()
        scores = torch.randn(64, 2, generator=torch.Generator().manual_seed(1))
        self.scores = nn.Parameter(scores.half(), requires_grad=False)
        self.experts = nn.Parameter(torch.stack([WEIGHT, -WEIGHT]).half(), requires_grad=False)
        self.other_row = other_row  # goes through the expert that scores lower

    def forward(self, x: Tensor) -> Tensor:
        own = (x @ self.scores).argmax(1)  # [rows]
        if self.other_row is not None:
            own = with_element(own, (self.other_row,), lambda expert: 1 - expert)
        return torch.einsum("rc,rcd->rd", x, self.experts[own])


def level_draws() -> list[tuple[Tensor, ...]]:
    """Draws of which eager chooses as the reference does, also with the one disturbance that every check makes."""
    router = Router()
    one, other = router.scores.float().unbind(1)
    score_difference = one - other
    for seed in range(100):
        data = []
        for draw in range(3):
            x = torch.randn(64, 64, generator=torch.Generator().manual_seed(3 * seed + draw))
            clear = (x @ score_difference)[:, None] * score_difference / score_difference.square().sum()
            x = x + clear  # of every row twice as much
            x[7] -= 2 * clear[7]
            data.append((x.half(),))
        part = measure(router, router, data, "fp16")
        if part.rounding is not None and part.rounding < 0.01:
            return data
    raise AssertionError("eager chooses otherwise in each draw")


ROUTED: dict[str, tuple[int, Callable[[Tensor], Tensor], bool]] = {
    "the other expert of a level row": (7, plain, True),
    "the other expert of another row": (3, plain, False),
    "half more of a row": (7, lambda y: with_element(y, (3,), lambda row: row * 1.5), False),
    "much more of the level row": (7, lambda y: with_element(y, (7,), lambda row: row * 1.5), False),
    "a percent of scale": (7, lambda y: y * 1.01, False),
}


@pytest.mark.parametrize("name", ROUTED)
def test_a_model_that_chooses_is_held_to_what_eagers_outcomes_span(name: str) -> None:
    row, mutant, is_right = ROUTED[name]
    other = Router(row)
    part = measure(Router(), lambda x: mutant(other(x)), level_draws(), "fp16")
    assert part.is_correct == is_right and part.is_checked and part.jumps, part.reason
    assert 32 <= part.jumps <= 3 * 64  # elements of row 7 in three draws, those near zero aside


@pytest.mark.parametrize("name", ROUTED)
def test_a_search_holds_its_candidates_to_the_same_outcomes(name: str) -> None:
    row, mutant, is_right = ROUTED[name]
    (x,), *_ = level_draws()
    captured = capture(Router().eval(), (x,))
    assert (Reference(captured).excess([mutant(Router(row)(x))]) <= 1) == is_right


def test_a_model_that_does_not_choose_has_no_element_that_jumps() -> None:
    for precision, dtype in (("fp32", torch.float32), ("fp16", torch.half), ("bf16", torch.bfloat16)):
        module = Product().to(dtype)
        part = measure(module, lambda x, own=module: own(x) * 1.05, [(x.to(dtype),) for (x,) in draws(64, 64)], precision)
        assert not part.is_correct and part.jumps is None, precision


@pytest.mark.parametrize("wrong_draw", range(3))
def test_an_error_on_one_draw_is_seen(wrong_draw: int) -> None:
    module, calls = Product(), iter(range(3))
    assert not measure(
        module, lambda x: module(x) * (1 + 0.1 * (next(calls) == wrong_draw)), draws(8, 64), "fp32"
    ).is_correct


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", None), ("tf32", None), ("fp16", torch.half), ("bf16", torch.bfloat16)]
)
def test_the_tolerance_is_what_the_check_can_see(precision: str, dtype: torch.dtype | None) -> None:
    """An error above it is seen, one below is not; another order of the same sum is within. On a CPU tf32 is fp32."""
    module = Product().to(dtype)
    data = [(x.to(dtype),) for (x,) in draws(64, 64)]
    right = measure(module, module, data, precision)
    assert right.is_correct and right.tolerance and right.rounding and right.element_tolerance and right.input_effect
    unit, multiple = torch.finfo(dtype or torch.float32).eps, MULTIPLE["fp32" if precision == "tf32" else precision]
    assert right.tolerance == max(FLOOR * unit, multiple * right.rounding)
    assert unit / 8 < right.rounding < 8 * unit and right.tolerance < 64 * unit < 1 < right.input_effect

    def off(by: float) -> Correctness:
        weight = module.weight.double()
        return measure(module, lambda x: (x.double() @ weight * (1 + by)).to(x.dtype), data, precision)

    near, far = off(0.5 * min(right.tolerance, right.element_tolerance)), off(1.5 * right.tolerance)
    assert near.is_correct and not near.equals_eager and not far.is_correct and precision in (far.reason or "")

    def reversed_sum(x: Tensor) -> Any:
        return sum(x[:, i : i + 8] @ module.weight[i : i + 8] for i in reversed(range(0, 64, 8)))

    assert measure(module, reversed_sum, data, precision).is_correct


def test_eager_that_happens_to_be_exact_demands_no_exactness() -> None:
    module = Lambda(lambda x: x * 2.0)
    assert measure(module, lambda x: x * 2.0 * (1 + 2e-7), draws(64), "fp32").is_correct
    assert not measure(module, lambda x: x * 2.0 * (1 + 1e-5), draws(64), "fp32").is_correct


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (lambda x: torch.ones(3), "could not be seen"),
        (lambda x: (x * 1e-9).sum(1) + 1e3, "could not be seen"),
        (lambda x: (x @ WEIGHT.to(x)).relu() * 0 + WEIGHT.to(x), "could not be seen"),
        (lambda x: x + torch.randn(x.shape) * 10, "could not be seen"),
        (lambda x: None, "no tensors"),
        (lambda x: (x, object()), "two calls of eager do not agree"),
        (lambda x: (x, object()), "no two of that type are equal, so return tensors"),
        (lambda x: x * torch.nan, "eager's own output is not finite"),
        (lambda x: {"a": (x * 1e30) ** 2}, "eager's own output['a'] is not finite"),
        (lambda x: torch.zeros(0) * x.sum(), "could not be seen"),
    ],
)
def test_a_comparison_that_could_not_fail_is_unchecked(act: Callable[[Tensor], Any], why: str) -> None:
    module = Lambda(act)
    part = measure(module, module, draws(64, 64), "fp32")
    assert not part.is_correct and not part.is_checked and why in (part.reason or ""), part


def test_where_rounding_may_hide_other_inputs_the_output_has_to_be_near(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that is nearer to the reference than half-way to the output of other inputs is no frozen one."""
    monkeypatch.setitem(MULTIPLE, "fp32", 1e8)
    module, data = Product(), draws(8, 64)
    frozen = module(*data[0])
    right, wrong = measure(module, module, data, "fp32"), measure(module, lambda x: frozen, data, "fp32")
    assert right.is_correct and right.tolerance == NEAR * (right.input_effect or 0)
    assert not wrong.is_correct and not wrong.is_checked and (wrong.relative_error or 0) < (wrong.tolerance or 0)
    half = measure(module, lambda x: module(x) * (1 + 1.2 * NEAR * (right.input_effect or 0)), data, "fp32")
    assert not half.is_correct and not half.is_checked


def test_a_wrong_execution_is_incorrect_even_where_inputs_do_not_show() -> None:
    part = measure(Lambda(lambda x: torch.ones(3)), lambda x: torch.zeros(3), draws(4), "fp32")
    assert part.is_checked and not part.is_correct


class Stubborn(Product):
    """Insists on fp32, or on its own type, within."""

    def forward(self, x: Tensor) -> Tensor:
        return self.form(x.float() if x.dtype == torch.float64 else x) @ self.weight


def test_where_fp64_does_not_run_the_reference_is_fp32() -> None:
    module, data = Stubborn().to(torch.bfloat16), [(x.bfloat16(),) for (x,) in draws(8, 64)]
    part = measure(module, module, data, "bf16")
    assert part.is_correct and part.reference == "fp32" and part.rounding
    assert not measure(module, lambda x: module(x) * 1.1, data, "bf16").is_correct
    part = measure(Lambda(lambda x: (x.float() @ WEIGHT).relu()), lambda x: (x @ WEIGHT).relu(), draws(8, 64), "fp32")
    assert part.is_correct and part.reference == "fp64"  # of what the module itself rounds, no copy is more precise


def test_where_there_is_no_memory_the_reference_is_eagers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "COPIES", 1e12)
    module = Product()
    part = measure(module, module, draws(8, 64), "fp32")
    assert part.is_correct and part.reference == "fp32" and part.relative_error == 0.0 and part.rounding
    assert not measure(module, lambda x: module(x) * 1.001, draws(8, 64), "fp32").is_correct


def test_the_reference_leaves_everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.BatchNorm1d(4)).eval()
    before = {name: t.clone() for name, t in module.state_dict().items()}
    data = draws(3, 4)
    copies = [x.clone() for (x,) in data]
    made = reference.references(nn.Sequential(nn.ReLU(inplace=True), module), data, "fp32")
    assert all(t.dtype == torch.float64 for t in made.outputs) and not torch.equal(made.outputs[0], made.disturbed[0])
    assert all(torch.equal(t, before[name]) for name, t in module.state_dict().items())
    assert all(torch.equal(x, copy) for (x,), copy in zip(data, copies, strict=True))
    assert torch.get_default_dtype() == torch.float32
    monkeypatch.setattr(reference, "SECONDS", 0.0)
    assert len(reference.references(module, data, "fp32").outputs) == reference.FEWEST_DRAWS < len(data)


def test_distance() -> None:
    a, b = torch.tensor([3.0, 4.0, 0.0]), torch.tensor([3.0, 4.0, 1.0])
    assert distance(b, a) == pytest.approx((1 / 5, 1 / 4)) and distance(a, a) == (0, 0)
    assert distance(b, a, typical=10.0) == pytest.approx((1 / (10 * 3**0.5), 1 / 10))
    assert distance(torch.tensor([1, 2, 3, 5]), torch.tensor([1, 2, 3, 4])) == (0.25, 0.25)
    assert distance(torch.tensor([1j]), torch.tensor([1.0 + 0j])) == pytest.approx((2**0.5, 2**0.5))


BRANCHES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "sum": (lambda x: x + 1 if x.sum() > 0 else x - 1, (torch.randn(64),)),
    "sum of what is positive": (lambda x: x + 1 if x.sum() > 40 else x - 1, (torch.rand(64),)),
    "small": (lambda x: x + 1 if x.std() < 2 else x - 1, (torch.randn(64),)),
    "large": (lambda x: x + 1 if x.std() > 0.5 else x - 1, (torch.randn(64),)),
    "sign": (lambda x: x + 1 if x.min() >= 0 else x - 1, (torch.rand(64),)),
    "square root": (lambda x: x.sqrt() if x.mean() < 1 else x.sqrt() + 1, (torch.rand(64),)),
    "all of a mask": (lambda x, m: x + 1 if m.all() else x * m, (torch.randn(4, 16), torch.ones(4, 16, dtype=torch.bool))),
    "any of a mask": (lambda x, m: x * ~m if m.any() else x + 1, (torch.randn(4, 16), torch.zeros(4, 16, dtype=torch.bool))),
    "a mask of numbers": (lambda x, m: x + 1 if m.sum() == 64 else x * m, (torch.randn(4, 16), torch.ones(4, 16).long())),
    "a flag": (lambda x, f: x + 1 if f else x - 1, (torch.randn(4), torch.tensor(True))),
    "a whole number": (lambda x, n: x + 1 if n == 5 else x - 1, (torch.randn(4), torch.tensor(5))),
    "a loop": (lambda x, n: x + sum(range(int(n))), (torch.randn(4), torch.tensor([6]))),
    "sum of ids": (lambda ids: ids * 0.5 if ids.sum() > 3000 else ids * 2.0, (torch.arange(100),)),
}  # fmt: skip


@pytest.mark.parametrize("name", BRANCHES)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_branch_that_tracing_has_frozen_is_incorrect(name: str, seed: int) -> None:
    act, inputs = BRANCHES[name]
    model = models.Model("custom", Lambda(act), inputs)
    traced = torch.jit.trace(model.module, model.fresh_inputs(seed), check_trace=False)
    data = [accepted(model.module, model.trial_inputs(seed + 1 + i)) for i in range(3)]
    part = measure(model.module, traced, data, "fp32")
    assert not part.is_correct and part.is_checked, part
    assert measure(model.module, model.module, data, "fp32").is_correct


def test_trials_stay_within_what_the_example_allows() -> None:
    ids, mask, bias = torch.arange(3, 50), torch.ones(8, 8).tril().bool(), torch.ones(8, 8).tril().log()
    model = models.Model("custom", nn.Identity(), (ids, mask, bias, torch.zeros(5, dtype=torch.long)))
    for seed in range(6):
        for some_ids, some_mask, some_bias, zeros in model.trial_inputs(seed)[:-1]:
            assert some_ids.min() >= 3 and some_ids.max() <= 49 and some_ids.dtype == torch.long
            assert some_mask[:, 0].all() and not torch.equal(some_mask, mask) and not zeros.any()
            assert torch.equal(some_bias.isfinite(), mask)
    sums = {int(model.trial_inputs(seed)[0][0].sum()) for seed in range(3)}
    assert len(sums) == 3 and max(sums) > 1.3 * min(sums)


def test_a_model_may_refuse_all_but_the_last() -> None:
    def act(x: Tensor) -> Tensor:
        assert x.abs().max() < 2, "too large"
        return x.log()

    model = models.Model("custom", Lambda(act), (torch.rand(16),))
    taken = [accepted(model.module, model.trial_inputs(seed))[0] for seed in range(3)]
    assert all((x > 0).all() for x in taken) and torch.equal(taken[1], model.fresh_inputs(1)[0])
    assert not torch.equal(taken[0], model.fresh_inputs(0)[0]) or taken[0].max() <= 1


def deep() -> nn.Sequential:
    """Without statistics of its own its activations vanish: 30 layers on random weights."""
    torch.manual_seed(0)
    layers = [[nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()] for _ in range(30)]
    return nn.Sequential(*(layer for block in layers for layer in block), nn.Flatten(), nn.Linear(4 * 36, 10)).eval()


def test_custom_models_are_calibrated_and_so_can_be_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    custom_cell = Cell(
        choose("model", "custom"), choose("system", "eager"), choose("runner", "correctness"), Conditions(1, "cpu", "fp32")
    )
    made = models.Model("custom", deep(), (torch.randn(1, 4, 6, 6),))
    monkeypatch.setattr("runners.cell.session.load", lambda *_, **__: made)
    checked = measured(Session(custom_cell, "0", lambda _: None), record(of=custom_cell))
    assert checked.is_ok and checked.correctness is not None and (checked.correctness.input_effect or 0) > 0.1
    monkeypatch.setattr("runners.cell.session.calibrate", lambda *_: None)
    monkeypatch.setattr(made.module[0], "weight", nn.Parameter(made.module[0].weight * 1e-12))
    unchecked = measured(Session(custom_cell, "0", lambda _: None), record(of=custom_cell))
    assert unchecked.status == "unchecked" and "could not be seen" in (unchecked.reason or "") and unchecked.latency is None


def test_only_norms_without_statistics_are_calibrated() -> None:
    trained, fresh, single = nn.BatchNorm1d(4), nn.BatchNorm1d(4), nn.BatchNorm2d(4)
    trained.running_mean = torch.full((4,), 3.0)
    x = torch.randn(8, 4) * 5
    module = nn.Sequential(trained, fresh).eval()
    calibrate(module, (x,))
    assert torch.equal(trained.running_mean, torch.full((4,), 3.0)) and torch.equal(trained.running_var, torch.ones(4))
    assert torch.allclose(module(x).std(0), torch.ones(4), atol=0.1)
    calibrate(nn.Sequential(nn.Unflatten(1, (4, 1, 1)), single).eval(), (x[:1],))
    assert torch.allclose(single.running_var, x[:1].var(correction=0)) and not single._forward_pre_hooks
