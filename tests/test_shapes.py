"""A module that is ready for several shapes: which of them a call takes, what is filled up and cut, what is refused."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from systems.base import BadOption
from systems.scheduling.module import Axis, ScheduledModule
from systems.weave.module import Weave

pytestmark = pytest.mark.usefixtures("cache_folder")
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


class Attention(nn.Module):
    """Masked attention over a sequence, and its mean: the length is in two inputs and in one output."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.value = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, mask: Tensor) -> dict[str, Tensor]:
        scores = (self.query(x) @ x.transpose(1, 2)).masked_fill(~mask[:, None, :], float("-inf"))
        tokens = scores.softmax(-1) @ self.value(x)
        masked_tokens = tokens * mask[:, :, None]
        return {"mean": masked_tokens.sum(1) / mask.sum(1, keepdim=True), "tokens": tokens}


BATCH = Axis(inputs={0: 0, 1: 0}, outputs={0: 0, 1: 0}, fill={1: True})
LENGTH = Axis(inputs={0: 1, 1: 1}, outputs={1: 1})
PREPARED = [(1, 8), (4, 4), (4, 8)]  # batch and length


def data(batch: int, length: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    return torch.randn(batch, length, 6, device=device), torch.ones(batch, length, dtype=torch.bool, device=device)


def woven(device: str = "cpu", **options: object) -> Weave:
    module = Weave(Attention().eval().to(device), axes=[BATCH, LENGTH], budget_s=0.0, **options)
    for batch, length in PREPARED:
        module.prepare(data(batch, length, device))
    return module


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.slow
def test_every_smaller_shape_is_answered_as_by_the_module(device: str) -> None:
    module = woven(device)
    for batch in (1, 3, 4):
        for length in (1, 4, 6, 8):
            inputs = data(batch, length, device)
            with torch.no_grad():
                expected = module.module(*inputs)
            out = module(*inputs)
            torch.testing.assert_close(out["mean"], expected["mean"], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(out["tokens"], expected["tokens"], rtol=1e-4, atol=1e-5)
    module.close()


def test_the_nearest_prepared_shape_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    module = woven()
    taken: list[tuple[int, int]] = []
    executor = type(next(iter(module.prepared.values())))
    call = executor.__call__

    def noting(self: object, *inputs: Tensor) -> object:
        taken.append((inputs[0].shape[0], inputs[0].shape[1]))
        return call(self, *inputs)  # type: ignore[arg-type]

    monkeypatch.setattr(executor, "__call__", noting)
    for shape, nearest in {(1, 8): (1, 8), (1, 3): (1, 8), (2, 2): (4, 4), (3, 8): (4, 8)}.items():
        module(*data(*shape))
        assert taken.pop() == nearest
    module.close()


def test_what_a_call_goes_into_is_looked_up_again_once_more_is_prepared_or_closed() -> None:
    module = woven()
    inputs = data(2, 2)
    for _ in range(2):
        module(*inputs)
    match = module.last_match
    assert match is not None and match.own != match.prepared
    module.prepare(inputs)
    module(*inputs)
    match = module.last_match
    assert match is not None and match.own == match.prepared
    module(*data(1, 2))  # of another form
    module(*inputs)
    module.close()
    with pytest.raises(ValueError, match="prepared for nothing"):
        module(*inputs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_call_on_another_stream_waits_for_the_last_one() -> None:
    module, inputs = woven("cuda"), data(4, 8, "cuda")
    expected = module(*inputs)["tokens"].clone()
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    with torch.cuda.stream(streams[0]):
        torch.cuda._sleep(1_000_000_000)  # cycles, some half a second
        module(*inputs)
    with torch.cuda.stream(streams[1]):
        tokens = module(*inputs)["tokens"]
        done = streams[1].record_event()
    assert not done.query() and not streams[0].query()
    torch.cuda.synchronize()
    torch.testing.assert_close(tokens, expected)
    module.close()


def test_an_unprepared_shape_is_refused_or_runs_the_module() -> None:
    module = woven()
    with pytest.raises(ValueError, match="prepare these inputs too"):
        module(*data(5, 4))
    with pytest.raises(ValueError, match="prepare these inputs too"):
        module(data(2, 4)[0], data(1, 4)[1])  # not as much smaller in both
    with pytest.raises(ValueError, match="prepare these inputs too"):
        module(data(1, 4)[0].double(), data(1, 4)[1])
    with pytest.raises(ValueError, match="called with a int, a int, prepared for"):
        module(1, 2)
    with pytest.raises(ValueError, match="called without inputs, prepared for float32"):
        module()
    with pytest.raises(TypeError, match="mask goes by name and others by position"):
        module(data(1, 4)[0], mask=data(1, 4)[1])
    module.close()
    module = woven(otherwise="module")
    inputs = data(5, 9)
    with torch.no_grad():
        torch.testing.assert_close(module(*inputs)["tokens"], module.module(*inputs)["tokens"])
    module.close()


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(BadOption, match="otherwise is pad"):
        Weave(Attention().eval(), otherwise="pad")
    with pytest.raises(BadOption, match=r"budget_s is -1.0: it is a number of seconds, not negative"):
        Weave(Attention().eval(), budget_s=-1.0)
    with pytest.raises(ValueError, match="input 2 has no dimension 0"):
        Weave(Attention().eval(), axes=[Axis({2: 0}, {})], budget_s=0.0).prepare(data(1, 4))


class Mixed(nn.Module):
    """Returns what is no tensor before its tensors."""

    def forward(self, x: Tensor) -> tuple[None, int, Tensor, Tensor]:
        return None, 3, x + 1, x.sum(1, keepdim=True)


def test_outputs_are_counted_among_tensors_alone() -> None:
    module = Weave(Mixed().eval(), axes=[Axis({0: 0}, {0: 0, 1: 0})], budget_s=0.0).prepare(torch.zeros(4, 2))
    nothing, number, more, sums = module(torch.ones(3, 2))
    assert (nothing, number, more.tolist(), sums.tolist()) == (None, 3, [[2.0, 2.0]] * 3, [[2.0]] * 3)
    module.close()


@pytest.mark.parametrize(
    ("axis", "message"),
    [
        (Axis({}, {}), "an axis names no input"),
        (Axis({0: -3}, {}), "input 0 has no dimension -3"),
        (Axis({-1: 0}, {}), "input -1 has no dimension 0"),
        (Axis({0: 0}, {2: 0}), "output 2 has no dimension 0"),
        (Axis({0: 0}, {-1: 0}), "output -1 has no dimension 0"),
        (Axis({0: 0}, {1: 2}), "output 1 has no dimension 2"),
        (Axis({0: 1}, {0: 1, 1: 1}), "output 1 has size 1 along dimension 1, and the inputs of its axis 2"),
    ],
)
def test_axes_that_do_not_fit_are_refused(axis: Axis, message: str) -> None:
    module = Weave(Mixed().eval(), axes=[axis], budget_s=0.0)
    with pytest.raises(ValueError, match=message):
        module.prepare(torch.zeros(4, 2))
    assert not module.prepared
    for no_list in (axis, [axis, 3], None):
        with pytest.raises(BadOption, match="axes is no list of Axis"):
            Weave(Mixed().eval(), axes=no_list)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("inputs", "outputs", "fill", "message"),
    [
        ([0], {0: 0}, {}, r"inputs=\[0\]"),
        ({"x": 0}, {0: 0}, {}, "inputs={'x': 0}"),
        ({0: 0}, {0: None}, {}, "outputs={0: None}"),
        ({0: 0}, {0: 0}, {0: "a"}, "fill={0: 'a'}"),
        ({0: 0}, {0: 0}, {1: 0.0}, "fills input 1, which is none of its inputs"),
    ],
)
def test_an_axis_names_tensors_by_number(inputs: Any, outputs: Any, fill: Any, message: str) -> None:
    with pytest.raises(BadOption, match=message):
        Axis(inputs, outputs, fill)


class Twice(nn.Module):
    """Two outputs, of which the second has the size of the batch alone."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x.sum(1)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (
            [Axis({0: 0}, {0: 0})],
            r"output 1 has size 3 along dimension 0 where an axis has 3, and 4 where it has 4",
        ),
        ([Axis({0: 0}, {1: 0})], r"output 0 .*outputs={0: 0}"),
        ([Axis({0: 0}, {0: 0, 1: 0}), Axis({0: 1}, {})], r"output 0 has size 1 along dimension 1 .*outputs={0: 1}"),
    ],
)
def test_an_axis_that_leaves_out_an_output_is_refused(axes: list[Axis], message: str) -> None:
    """Else a call would return rows that are none of its own."""
    module = Weave(Twice().eval(), axes=axes, budget_s=0.0)
    with pytest.raises(ValueError, match=message):
        module.prepare(torch.zeros(4, 2))
    assert not module.prepared


def test_a_module_may_refuse_a_smaller_size() -> None:
    """It is then called at its own."""

    class Fixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] != 4:
                raise ValueError("made for four")
            return x + 1

    module = Weave(Fixed().eval(), axes=[Axis({0: 0}, {0: 0})], budget_s=0.0).prepare(torch.zeros(4, 2))
    assert module(torch.ones(3, 2)).tolist() == [[2.0, 2.0]] * 3
    module.close()


class Digits(nn.Module):
    """Has its elements in one number, the first as its last digit."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * 10.0 ** torch.arange(x.numel()).view(x.shape)).sum()


def test_what_lacks_is_filled_with_what_was_named() -> None:
    module = Weave(Digits().eval(), axes=[Axis({0: 1}, {}, fill={0: 7})], budget_s=0.0).prepare(torch.zeros(1, 4))
    assert module(torch.ones(1, 3)).item() == 7111
    module.close()


@pytest.mark.parametrize("is_first", [True, False])
def test_each_axis_fills_with_its_own(is_first: bool) -> None:
    """In whichever order they are named, of which the last fills the corner."""
    axes = [Axis({0: 1}, {}, fill={0: 7}), Axis({0: 0}, {}, fill={0: 3})]
    axes = axes if is_first else axes[::-1]
    module = Weave(Digits().eval(), axes=axes, budget_s=0.0).prepare(torch.zeros(2, 3))
    assert module(torch.ones(1, 2)).item() == (333711 if is_first else 733711)
    module.close()


def test_all_shapes_share_one_arena() -> None:
    module = woven()
    assert isinstance(module, ScheduledModule)
    assert module.state_dict().keys() == Attention().state_dict().keys()
    with torch.no_grad():
        module.query.weight.zero_()
        inputs = data(3, 5)
        torch.testing.assert_close(module(*inputs)["tokens"], module.module(*inputs)["tokens"], rtol=1e-4, atol=1e-5)
    module.close()


def test_a_copy_is_refused_in_words() -> None:
    module = Weave(nn.Linear(2, 2).eval(), budget_s=0.0)
    for holder in (module, nn.Sequential(module)):
        with pytest.raises(TypeError, match="a Weave cannot be copied or pickled: wrap a copy of its module"):
            copy.deepcopy(holder)
    assert isinstance(copy.deepcopy(module.module), nn.Linear)


@given(
    sizes=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=5, unique=True),
    shape=st.tuples(st.integers(1, 6), st.integers(1, 6)),
)
def test_the_nearest_shape_by_trying_all(sizes: list[tuple[int, int]], shape: tuple[int, int]) -> None:
    module = ScheduledModule(nn.Identity(), None, [Axis({0: 0}, {}), Axis({0: 1}, {})])  # type: ignore[arg-type]
    module.prepared = {((torch.Size(s), torch.float32, torch.device("cpu")),): None for s in sizes}  # type: ignore[misc]
    nearest = module._nearest(((torch.Size(shape), torch.float32, torch.device("cpu")),))
    fitting = [s for s in sizes if s[0] >= shape[0] and s[1] >= shape[1]]
    if shape in sizes:
        assert nearest is not None and nearest[0][0] == torch.Size(shape)
    elif not fitting:
        assert nearest is None
    else:
        assert nearest is not None and nearest[0][0].numel() == min(a * b for a, b in fitting)
