"""The form of a call's inputs, beside a comparison of what each tensor says of itself."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from systems.scheduling.graph.input_check import InputCheck, InputForm

CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "elsewhere": Tensor.clone,
    "turned": lambda x: x.transpose(0, -1),
    "shorter": lambda x: x[:-1],
    "expanded": lambda x: x[:1].expand_as(x),
    "double": Tensor.double,
    "another device": lambda x: x.to("meta"),
    "parameter": lambda x: nn.Parameter(x.detach().clone()),
    "differentiable": lambda x: x.detach().clone().requires_grad_(),
    "negative by a flag": torch._neg_view,
    "sparse": Tensor.to_sparse,
}
SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=3)


def _said(x: Tensor) -> tuple[object, ...]:
    strides = x.stride() if x.layout is torch.strided else None
    return type(x), x.shape, strides, x.dtype, x.device, x.layout, x.is_conj(), x.is_neg(), x.requires_grad


@given(st.lists(st.tuples(SHAPES, st.sampled_from(sorted(CHANGES))), max_size=4))
def test_a_form_is_what_each_tensor_says_of_itself(drawn: list[tuple[list[int], str]]) -> None:
    before = [torch.rand(shape) for shape, _ in drawn]
    form = InputForm(before)
    after = [CHANGES[change](x) for x, (_, change) in zip(before, drawn, strict=True)]
    assert form.is_of(after) == (list(map(_said, after)) == list(map(_said, before)))
    assert form.is_of(before), "and it stays that of those it was made of"


def test_other_numbers_and_kinds_of_inputs_have_another_form() -> None:
    x, y = torch.rand(2), torch.rand(2)
    form = InputForm([x, y])
    assert form.is_of([x, y]) and form.is_of((y, x))
    others: list[list[object]] = [[], [x], [x, y, y], [x, 1.0], [x, None], [x, x]]
    assert not any(map(form.is_of, others))


def test_a_tensor_that_is_resized_in_place_loses_its_form() -> None:
    x = torch.rand(6)
    form = InputForm([x])
    x.resize_(3)
    assert not form.is_of([x])
    x.resize_(6)
    assert form.is_of([x])


@pytest.mark.parametrize("mode", [torch.inference_mode, lambda: torch.autocast("cpu"), torch.no_grad])
def test_another_mode_of_the_thread_never_makes_a_form_fit_that_does_not(mode: Callable[[], object]) -> None:
    x = torch.rand(2, 3)
    form = InputForm([x])
    with mode():  # type: ignore[attr-defined]
        assert not form.is_of([x.t()])
        within = InputForm([x])
        assert within.is_of([x]) and not within.is_of([x.t()])
    assert form.is_of([x])


def test_wrong_inputs_are_refused_before_and_after_a_form_is_known() -> None:
    check, x = InputCheck([torch.rand(2, 3)]), torch.rand(2, 3)
    for is_known in (False, True, True):
        for wrong in ([], [x, x], [x.double()], [x[:1]], [x.to_sparse()], [torch._neg_view(x)], [1.0]):
            with pytest.raises(ValueError, match="input"):
                check.is_known(wrong)  # type: ignore[arg-type]
        assert check.is_known([x]) is is_known
    assert not check.is_known([x.t().contiguous().t()]) and check.is_known([x.t().contiguous().t()])


def test_inputs_without_strides_are_right_and_never_known() -> None:
    x = torch.rand(2, 3).to_sparse()
    check = InputCheck([x])
    assert not check.is_known([x]) and not check.is_known([x])
