"""A tensor that a module changes in place, and what else sees its memory: each reads what eager execution reads."""

from collections.abc import Callable

import pytest
import torch
from modules import Lambda
from rewriting import DEVICES
from torch import Tensor, nn
from torch.nn import functional

import systems
from systems.base import Unsupported
from systems.scheduling.graph.capture import capture

View = Callable[[Tensor], Tensor]

UNSAID: dict[str, View] = {
    "einsum": lambda x: torch.einsum("ab->ba", x),
    "type_as": lambda x: x.type_as(torch.ones(1)),
    "sum_to_size": lambda x: x.sum_to_size(4, 4),
    "broadcast_tensors": lambda x: torch.broadcast_tensors(x, torch.ones(1))[0],
    "meshgrid": lambda x: torch.meshgrid(x[0], x[1], indexing="ij")[0],
}


class Held(nn.Module):
    """Changes a buffer, of which a view was taken before."""

    def __init__(self, view: View):
        super().__init__()
        self.view = view
        self.register_buffer("state", torch.randn(4, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        view = self.view(self.state)  # type: ignore[arg-type]
        self.state.add_(x)  # type: ignore[operator]
        return view * 2, self.state + x  # type: ignore[operator]


@pytest.mark.parametrize("name", UNSAID)
def test_a_view_that_its_schema_does_not_tell_of_sees_the_change(name: str) -> None:
    def act(x: Tensor) -> tuple[Tensor, Tensor]:
        changed = x * 2
        view = UNSAID[name](changed)
        changed.add_(1)
        return view * 2, changed + x

    x = torch.randn(4, 4)
    for module in (Lambda(act).eval(), Held(UNSAID[name]).eval()):
        program = capture(module, (torch.randn(4, 4),))
        before = {key: value.clone() for key, value in module.state_dict().items()}
        outputs = program.run((x,))
        after = {key: value.clone() for key, value in module.state_dict().items()}
        module.load_state_dict(before)
        for out, expected in zip(outputs, module(x), strict=True):
            torch.testing.assert_close(out, expected)
        torch.testing.assert_close(after, {**module.state_dict()})


class Written(nn.Module):
    """Copies what it computes to a buffer, and returns what it reads there."""

    def __init__(self, value: View, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.value = value
        self.register_buffer("state", torch.zeros(4, 6, dtype=dtype))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.state[:] = self.value(x)  # type: ignore[index]
        return self.state + 1, self.state.view(-1) * 2  # type: ignore[operator]


WRITTEN: dict[str, Written] = {
    "another dtype": Written(lambda x: x * 3, torch.int64),
    "a narrower dtype": Written(lambda x: x * 3, torch.float16),
    "a truth": Written(lambda x: x > 0),
    "one number": Written(lambda x: x[0, 0] * 2),
    "one row": Written(lambda x: x[0] * 2),
    "other strides": Written(lambda x: (x.view(6, 4) * 2).t()),
}


@pytest.mark.parametrize("value", WRITTEN)
def test_what_a_buffer_holds_is_of_its_own_dtype_and_shape(value: str) -> None:
    module, x = WRITTEN[value].eval(), torch.randn(4, 6)
    program = capture(module, (torch.randn(4, 6),))
    for out, expected in zip(program.run((x,)), module(x), strict=True):
        assert torch.equal(out, expected) and out.dtype is expected.dtype and out.stride() == expected.stride()


def test_an_output_that_is_a_buffer_is_neither_an_input_nor_another_output() -> None:
    class Returned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("first", torch.zeros(4))
            self.register_buffer("second", torch.zeros(4))

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            self.first.copy_(x)  # type: ignore[operator]
            self.second.copy_(y := x * 2)  # type: ignore[operator]
            return self.first.view(2, 2), self.second, y  # type: ignore[operator, return-value]

    x = torch.randn(4)
    outputs = capture(Returned().eval(), (torch.randn(4),)).run((x,))
    assert torch.equal(outputs[0].view(4), x) and torch.equal(outputs[1], x * 2) and torch.equal(outputs[2], x * 2)
    assert len({t.data_ptr() for t in (x, *outputs)}) == 4


def test_a_value_that_lies_as_its_buffer_is_read_itself() -> None:
    program = capture(Written(lambda x: x * 2).eval(), (torch.randn(4, 6),))
    assert [o.name for o in program.graph.operators] == ["mul", "add", "view", "mul", "copy_back"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_shuffled_channels_share_memory_where_eager_execution_has_it(
    groups: int, memory_format: torch.memory_format, device: str
) -> None:
    def act(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        changed = x * 2
        shuffled = functional.channel_shuffle(changed, groups)
        changed.add_(1)
        return functional.channel_shuffle(x, groups), shuffled * 2, changed

    x = torch.randn(2, 4, 3, 3, device=device).contiguous(memory_format=memory_format)
    for _ in range(2):  # a trace remembers equal calls
        outputs, expected = capture(Lambda(act).eval(), (x,)).run((x,)), act(x)
        torch.testing.assert_close(tuple(outputs), expected)
        assert (outputs[0].data_ptr() == x.data_ptr()) is (expected[0].data_ptr() == x.data_ptr())


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_off_a_cpu_shuffled_channels_are_a_view_where_nothing_moves(groups: int) -> None:
    module, x = Lambda(lambda x: functional.channel_shuffle(x, groups)).eval(), torch.randn(2, 4, 3, 3, device="meta")
    for layout in (x, x.transpose(2, 3)):
        is_view = "channel_shuffle" not in [o.name for o in capture(module, (layout,)).graph.operators]
        assert is_view is (groups != 2 and layout is x)


def test_what_changes_nothing_keeps_its_operators() -> None:
    module = Lambda(lambda x: torch.einsum("ab,bc->ca", x, x) + 1).eval()
    assert [o.name for o in capture(module, (torch.randn(4, 4),)).graph.operators] == ["einsum", "add"]


REFUSED: dict[str, Callable[[Tensor], object]] = {
    "lie in one place": lambda x: x[:1].expand(4, 4)[:, ::2].fill_(0.5),
    "several elements": lambda x: x.unfold(0, 2, 1).add_(1),
    "unsafe_chunk.default may see it": lambda x: x.unsafe_chunk(2)[0].add_(1),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_change_that_cannot_be_decomposed_is_refused(reason: str) -> None:
    def act(x: Tensor) -> Tensor:
        changed = functional.relu(x)
        REFUSED[reason](changed)
        return changed

    with pytest.raises(Unsupported, match=reason):
        capture(Lambda(act).eval(), (torch.randn(4, 4),))


@pytest.mark.parametrize("view", [lambda x: x[:1].expand(4, 4)[2], lambda x: x.t()[::2], torch.diagonal])
def test_a_view_without_overlap_is_changed(view: View) -> None:
    def act(x: Tensor) -> Tensor:
        changed = x * 2
        view(changed).add_(1)
        return changed

    module, x = Lambda(act).eval(), torch.randn(4, 4)
    torch.testing.assert_close(capture(module, (x,)).run((x,))[0], module(x))


def test_an_overlapping_tensor_is_turned_in_place() -> None:
    """Which writes nothing."""
    module, x = Lambda(lambda x: (x * 2)[:1].expand(4, 4).t_() + x).eval(), torch.randn(4, 4)
    torch.testing.assert_close(capture(module, (x,)).run((x,))[0], module(x))


class Turning(nn.Module):
    """Norms over channels that come last, as networks of sequences and time series have them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.second, self.out = nn.BatchNorm1d(5), nn.BatchNorm1d(5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x.transpose(1, 2)).relu().transpose(1, 2)
        return self.out(self.second(y.reshape(-1, 5)).view(x.shape) + x)


@pytest.mark.parametrize("choice", ["nimble", "nimble_fused"])
@pytest.mark.usefixtures("cache_folder")
def test_a_norm_of_a_turned_sequence_is_reshaped_as_in_eager_execution(choice: str) -> None:
    module = Turning().eval()
    prepared = systems.load(choice).prepare(module, (torch.randn(2, 7, 5),))
    x = torch.randn(2, 7, 5)
    out, expected = prepared(x), module(x)
    torch.testing.assert_close(out, expected)
    assert out.stride() == expected.stride()
    prepared.close()
