"""Made-up records, and strategies for arbitrary ones."""

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

import conf
from results.calls import Comparison, Latency, Memory, Throughput
from results.cell import Cell, Choice, Conditions, choose
from results.course import Course
from results.environment import Environment
from results.record import STATUSES, Record, identity
from results.statistics import describe
from results.warning import Warning

CONDITIONS = Conditions(1, "cpu")
ENVIRONMENT = Environment(host="here", cpu="a CPU", cores=2, python="3.12", libraries={"torch": "2.11"}, code="c0de")


def chosen(group: str, choice: str, **changes: Any) -> Choice:
    """A choice of conf/, or one of that name alone."""
    if choice in conf.choices(group):
        return choose(group, choice, **changes)
    return Choice.of(choice, {"name": choice, **changes})


def cell(system: str = "nimble", model: str = "nasnet", runner: str = "bench", **conditions: Any) -> Cell:
    choices = chosen("model", model), chosen("system", system), chosen("runner", runner)
    return Cell(*choices, replace(CONDITIONS, **conditions))


def record(system: str = "nimble", of: Cell | None = None, environment: Environment = ENVIRONMENT, **more: Any) -> Record:
    """A record of a system on "nasnet", or of a cell, with further fields."""
    own = of or cell(system)
    usual: dict[str, Any] = {"status": "ok", "reason": None, "when": "2026-01-01"}
    return Record(**{"id": identity(own, environment), "cell": own, "environment": environment, **usual, **more})


def latency(*host_ms: float) -> Latency:
    return Latency(3, host_ms, None, describe(host_ms), None)


def throughput(*runs: float) -> Throughput:
    return Throughput(10, runs, describe(runs))


def memory(peak_bytes: int) -> Memory:
    return Memory("resident set", 100, peak_bytes)


def rounds(group: str, *samples: list[float]) -> Comparison:
    return Comparison(group, ("a", "b"), "2026-01-01", tuple(map(tuple, samples)))


# Arbitrary records: what a strategy cannot find from a type is registered here.

words = st.text(max_size=8)
numbers = st.floats(-1e9, 1e9) | st.integers(-(10**6), 10**6).map(float)
values = st.none() | st.booleans() | st.integers(-9, 9) | numbers | words


def _course(steps: list[tuple[float, float]]) -> Course:
    spans = [(begin, begin + 1, warps) for begin, warps in steps]
    return Course.from_json(Course.of(spans, 1e4).to_json())  # rounded as files are


def _choice(name: str, options: dict[str, Any], changed: list[str]) -> Choice:
    return Choice(name, name, tuple(sorted(options.items())), tuple(changed))


st.register_type_strategy(float, numbers)
st.register_type_strategy(str, words)
st.register_type_strategy(
    Choice, st.builds(_choice, words, st.dictionaries(words, values, max_size=3), st.lists(words, max_size=2))
)
st.register_type_strategy(Course, st.builds(_course, st.lists(st.tuples(st.integers(0, 9), st.integers(0, 99)), max_size=4)))
st.register_type_strategy(
    Warning,
    st.sampled_from(
        [
            Warning("latency_scatters", {"spread": 0.25}),
            Warning("no_ratio", {"status": "failed", "reason": "it ended"}),
            Warning("profiled_before_timing"),
            Warning("notice", {"text": "learned in place"}),
        ]
    ),
)
arbitrary_records = st.builds(Record, status=st.sampled_from(STATUSES))
