"""Calls as functions of what has been computed so far."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from systems.scheduling.graph.program import Call, Input, Output

SLOTS = 5
VALUES = [(f"value {i}", f"second of {i}") for i in range(SLOTS)]
INPUTS = [f"input {i}" for i in range(SLOTS)]
places = st.integers(0, SLOTS - 1)
leaves = st.one_of(
    st.builds(Output, places, st.sampled_from([None, 0, 1])),
    st.builds(Input, places),
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
)
arguments = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=2),
    ),
    max_leaves=8,
)
KEYWORDS = ["other", "dim", "self", "from", "function", "values", "inputs", "constant_1"]


def plain(argument: Any) -> Any:
    """What stands for an argument, found by going through it."""
    match argument:
        case Output(operator, None):
            return VALUES[operator]
        case Output(operator, index):
            return VALUES[operator][index]
        case Input(index):
            return INPUTS[index]
        case list() | tuple():
            return type(argument)(plain(a) for a in argument)
        case dict():
            return {key: plain(a) for key, a in argument.items()}
    return argument


@given(st.lists(arguments, max_size=4), st.dictionaries(st.sampled_from(KEYWORDS), arguments, max_size=3))
def test_a_launch_gets_what_its_arguments_stand_for(args: list[Any], kwargs: dict[str, Any]) -> None:
    seen: list[tuple[Any, Any]] = []
    call = Call(lambda *a, **k: seen.append((a, k)) or len(seen), tuple(args), kwargs)
    assert [call.launch(VALUES, INPUTS), call.launch(VALUES, INPUTS)] == [1, 2]  # type: ignore[arg-type]
    wanted = tuple(plain(a) for a in args), {name: plain(a) for name, a in kwargs.items()}
    assert seen == [wanted, wanted]


def test_a_launch_passes_an_argument_on_as_it_is() -> None:
    """A tensor is not looked into, and a list that an operator may write to is a new one each time."""
    constant, items = object(), [1, 2]
    first, second = (Call(lambda *a: a, (constant, items), {}).launch((), ()) for _ in range(2))
    assert first[0] is second[0] is constant and first[1] == items and first[1] is not items
