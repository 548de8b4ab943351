"""Properties of the measurements: against independent code, on random data, and by what they call."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace

import networkx as nx
import numpy as np
import pytest
import torch
from conftest import ROOT, environment
from dags import as_networkx, dags
from hypothesis import given
from hypothesis import strategies as st
from made_records import cell, record

from results.cell import Cell, Conditions, choose
from results.limits import Limits
from results.statistics import FEW, describe, spread
from runners.cell.calls import MOST_CALLS, sample
from runners.cell.measuring import measured, profiled
from runners.cell.session import Session
from runners.measurements import active_warps, latency, sm_efficiency, throughput
from runners.measurements.base import NOT_YET
from runners.measurements.correctness import relative_error
from runners.measurements.sm_efficiency import GRAPH, KERNELS, METRIC, RANGE, CountersUnavailable, occupied, parse_counters
from systems.profiling.limits import critical_path
from systems.scheduling.graph.operator_graph import OperatorGraph

MIB = 2**20
SAMPLES = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=40)


class Counted:
    """A call that counts itself."""

    def __init__(self, act: Callable[[], object] = lambda: None):
        self.calls, self.act = 0, act

    def __call__(self) -> object:
        self.calls += 1
        return self.act()


@given(SAMPLES)
def test_statistics_lie_in_order_and_scale_with_the_unit(samples: list[float]) -> None:
    statistics = describe(samples)
    assert [statistics.median, statistics.mean] == pytest.approx([np.median(samples), np.mean(samples)])
    low, high = statistics.ci95
    assert low <= statistics.median <= high and statistics.min == min(samples)
    assert (min(samples) <= low and high <= max(samples)) or 1 < len(samples) < FEW
    assert statistics.p10 <= statistics.median <= statistics.p90 <= statistics.p99 <= max(samples)
    doubled = describe([2 * s for s in samples])
    assert doubled.ci95 == pytest.approx((2 * low, 2 * high)) and doubled.median == 2 * np.median(samples)
    assert spread(samples) == pytest.approx(spread([2 * s for s in samples])) and spread(samples) >= 0


def test_an_interval_narrows_with_samples_and_holds_the_truth_as_often_as_it_says() -> None:
    draws = np.random.default_rng(5)
    intervals = [describe(draws.normal(10.0, 1.0, 50).tolist()).ci95 for _ in range(200)]
    num_holding = sum(low <= 10.0 <= high for low, high in intervals)
    assert 0.90 <= num_holding / 200 <= 0.99
    low, high = describe(draws.normal(10.0, 1.0, 5000).tolist()).ci95
    assert high - low < 0.3 * np.mean([b - a for a, b in intervals])


def test_every_sampled_call_is_kept_and_no_other() -> None:
    for least, seconds, most in ((7, 0.0, 500), (3, 60.0, 20)):
        call = Counted()
        assert len(sample(call, "cpu", least, seconds, most)) == call.calls == (least if not seconds else most)
    call = Counted()
    part = latency.measure(call, "cpu", samples=30)
    assert call.calls == len(part.host_ms) and part.warmup_calls == 0
    assert 30 <= len(part.host_ms) == part.host.n <= MOST_CALLS
    assert part.host == describe(part.host_ms) and part.device is None


def test_samples_are_whole_nanoseconds() -> None:
    """A float of seconds since the machine was started has digits that no clock tells, and each takes room in a record."""
    for milliseconds in sample(Counted(lambda: time.sleep(1e-4)), "cpu", 20):
        assert milliseconds == round(milliseconds * 1e6) / 1e6 >= 0.1


def test_more_samples_than_the_usual_bound_are_taken_where_they_are_asked() -> None:
    assert len(sample(lambda: None, "cpu", MOST_CALLS + 100, 0.3)) == MOST_CALLS + 100


@pytest.mark.parametrize(
    ("expected_ms", "calls"),
    [(1e9, throughput.FEWEST_CALLS), (1e-9, throughput.MOST_CALLS), (throughput.RUN_SECONDS * 1e3 / 50, 50)],
)
def test_a_run_of_throughput_has_the_calls_that_fill_it(expected_ms: float, calls: int) -> None:
    call = Counted()
    part = throughput.measure(call, "cpu", 3, expected_ms)
    assert abs(part.calls - calls) <= 1 and call.calls == throughput.RUNS * part.calls
    assert len(part.runs) == throughput.RUNS and part.statistics == describe(part.runs)


def test_throughput_is_in_samples_not_in_calls() -> None:
    def slow() -> None:
        torch.empty(1)
        time.sleep(0.01)

    one = throughput.measure(slow, "cpu", 1, 1e9).statistics.median
    eight = throughput.measure(slow, "cpu", 8, 1e9).statistics.median
    assert 33 < one <= 100 and 8 * 33 < eight <= 800


MEASURE_MEMORY = """
import json, os, torch
from runners.measurements.memory import MemoryMeter
N = 8 << 20
def at_once(): return torch.ones(N) + torch.ones(N)  # three of 32 MiB
def in_turn(): return torch.stack([torch.ones(N).sum(), torch.ones(N).sum(), torch.ones(N).sum()])
def single(): return torch.ones(25 << 20)
MemoryMeter("cpu")  # imports
for call in at_once, in_turn, single:
    if not os.fork():
        print(json.dumps(vars(MemoryMeter("cpu").measure(call, {"arena": 5}))), flush=True)
        break
    os.wait()
os._exit(0)  # to give back what was imported takes a second
"""


@pytest.mark.slow
def test_memory_sees_what_a_call_holds_at_once_and_not_what_it_gave_back() -> None:
    # In a process each, as every cell: what earlier tests left behind would be given back in the midst of it.
    command = [sys.executable, "-c", MEASURE_MEMORY]
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=environment())
    parts = [json.loads(line) for line in run.stdout.splitlines()]
    at_once, in_turn, single = (part["peak_bytes"] / MIB for part in parts)
    assert 20 < in_turn < 60 < 80 < at_once < 140 and 95 < single < 200
    assert all(part["system"] == {"arena": 5} for part in parts)


@given(st.lists(st.integers(-100, 100), min_size=1, max_size=20), st.floats(-2, 2))
def test_relative_error_is_that_of_numpy(values: list[int], by: float) -> None:
    reference = np.array(values, dtype=float)
    norm = float(np.linalg.norm(reference)) or 1.0
    out = reference + by
    expected = float(np.linalg.norm(out - reference)) / norm
    assert relative_error(torch.tensor(out), torch.tensor(reference)) == pytest.approx(expected)


def test_relative_error_of_small_types_is_taken_in_double_precision() -> None:
    large = torch.full((100,), 60000.0, dtype=torch.float16)  # squares overflow in fp16 and in its sums
    assert relative_error(large, large) == 0.0
    assert relative_error(large * 0.5, large) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("kernels", "share"),
    [
        ([(0.0, 10.0, 4)], 1.0),
        ([(0.0, 10.0, 1)], 0.25),
        ([(0.0, 10.0, 400)], 1.0),  # more blocks than SMs
        ([(0.0, 10.0, 4), (20.0, 30.0, 4)], 2 / 3),  # a gap between them
        ([(0.0, 10.0, 2), (0.0, 10.0, 2)], 1.0),  # beside each other
        ([(0.0, 10.0, 2), (5.0, 15.0, 2)], (0.5 * 5 + 1.0 * 5 + 0.5 * 5) / 15),
        ([(5.0, 15.0, 2), (0.0, 10.0, 2)], (0.5 * 5 + 1.0 * 5 + 0.5 * 5) / 15),  # in whatever order they come
        ([(0.0, 10.0, 4), (10.0, 20.0, 4)], 1.0),  # back to back
    ],
)
def test_the_share_of_a_timeline_that_was_made_by_hand(kernels: list[tuple[float, float, int]], share: float) -> None:
    assert occupied(kernels, 4) == pytest.approx(share)


def test_counted_warps_weigh_by_the_time_that_they_were_active() -> None:
    head = f'"ID","{METRIC}","{active_warps.WARPS}","{active_warps.DURATION}"'
    text = f'==PROF== x\n{head}\n"","%","warp","ns"\n"0","50","8.0","1,000"\n"1","100","4.0","500"\n'
    assert active_warps.parse(text) == (pytest.approx(1000 * 0.5 * 8 + 500 * 4), 1500)
    with pytest.raises(CountersUnavailable, match="sm__warps"):
        active_warps.parse(text.replace(active_warps.WARPS, "other"))
    with pytest.raises(CountersUnavailable, match="nothing"):
        active_warps.parse(head)


NCU = """==PROF== Connected to process 4242 (/usr/bin/python3.12)
==PROF== Profiling "graph": 0%....50%....100% - 12 passes
==PROF== Disconnected from process 4242
"ID","Process ID","Process Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC",{metrics}
"","","","","","","","","",{units}
"0","4242","python3.12","graph","1","7","","","0","9.0",{first}
"1","4242","python3.12","void f<float, 4>(int, ""x"")","1","7","(128, 1, 1)","(1, 1, 1)","0","9.0",{second}
==PROF== Trace file
"""


def ncu(metric: str = METRIC, percent: str = "75.50") -> str:
    names = f'"gpu__time_duration.sum","{metric}"'
    return NCU.format(metrics=names, units='"ns","%"', first=f'"1,200,000","{percent}"', second='"400000","10"')


def test_counters_of_several_workloads_weigh_by_their_durations() -> None:
    active, elapsed = parse_counters(ncu())
    assert elapsed == 1_600_000 and active == pytest.approx(1_200_000 * 0.755 + 40_000)


@pytest.mark.parametrize("text", [ncu(metric="sm__cycles_elapsed.max"), ncu(percent="n/a"), ncu(percent="")])
def test_counters_that_were_not_collected_are_no_zeros(text: str) -> None:
    with pytest.raises(CountersUnavailable, match=r"sm__cycles_active"):
        parse_counters(text)


@pytest.mark.parametrize(("call_ms", "share"), [(1.0, 0.946), (2.0, 0.473), (0.5, 1.0)])
def test_what_the_profiler_stretches_is_put_over_an_undisturbed_call(
    monkeypatch: pytest.MonkeyPatch, call_ms: float, share: float
) -> None:
    monkeypatch.setattr(sm_efficiency, "profiled", lambda *_: ncu())  # 1.6 ms, in which SMs are active for 0.946
    monkeypatch.setattr(sm_efficiency.shutil, "which", lambda _: "/usr/bin/ncu")
    for workloads in (GRAPH, KERNELS, RANGE):
        part = sm_efficiency.measure(lambda: None, cell(device="cuda"), workloads, "auto", call_ms)
        assert (part.value, part.source, part.reason) == (pytest.approx(share), "counters", None)
        assert part.profiled_ms == 1.6


@pytest.mark.parametrize(
    ("is_captured", "streams", "workloads"), [(True, 4, GRAPH), (True, 1, GRAPH), (False, 1, KERNELS), (False, 3, RANGE)]
)
def test_kernels_of_one_stream_are_counted_one_by_one(is_captured: bool, streams: int, workloads: Sequence[str]) -> None:
    session = SimpleNamespace(is_captured=is_captured, streams=streams)
    assert sm_efficiency.workloads_of(session) == workloads  # type: ignore[arg-type]


@given(dags(max_nodes=30), st.data())
def test_the_critical_path_is_the_longest_path(graph: OperatorGraph, data: st.DataObject) -> None:
    times = data.draw(st.lists(st.floats(0, 10), min_size=len(graph), max_size=len(graph)))
    theirs = nx.DiGraph()  # the time of an operator stands on every edge that leaves it, one to a common end among them
    theirs.add_edges_from((u, v, {"weight": times[u]}) for u, v in as_networkx(graph).edges)
    theirs.add_edges_from((u, "end", {"weight": times[u]}) for u in range(len(graph)))
    length = critical_path(graph, times)
    assert length == pytest.approx(nx.dag_longest_path_length(theirs))
    assert max(times) <= length <= sum(times) + 1e-9


def test_a_rounds_calls_are_those_of_the_prepared_system(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """The interleaved rounds call what was measured, on the same inputs, and keep every sample."""
    (tmp_path / "counted_model.py").write_text(
        "import torch\n"
        "class Doubled(torch.nn.Module):\n"
        "    calls = 0\n"
        "    def forward(self, x):\n"
        "        Doubled.calls += 1\n"
        "        return x * 2\n"
        "def make(batch): return Doubled(), (torch.ones(batch, 2),)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    model, runner = choose("model", "custom", factory="counted_model:make"), choose("runner", "latency", samples=5)
    session = Session(Cell(model, choose("system", "eager"), runner, Conditions(3, "cpu")), "0", lambda phase: None)
    session.prepare()
    import counted_model  # type: ignore[import-not-found]

    before = counted_model.Doubled.calls
    times = session.round()
    assert counted_model.Doubled.calls == before + 2 + len(times) and len(times) >= 10 and min(times) > 0
    assert torch.equal(session.call(), 2 * session.inputs[0]) and session.inputs[0].shape == (3, 2)


@pytest.mark.parametrize("known", [None, Limits(1.0, 2.0, 3)])
@pytest.mark.slow
def test_a_system_that_rewrites_the_model_has_limits_of_its_own_beside_the_models(known: Limits | None) -> None:
    system = choose("system", "nimble", fold_batch_norm=True)
    chosen = choose("model", "resnet18"), system, choose("runner", "limits")
    measured_cell = Cell(*chosen, Conditions(1, "cpu", "fp32"))
    session = Session(measured_cell, "0", lambda _: None)
    session.known_limits = known
    limits = measured(session, record(of=measured_cell)).limits
    assert limits is not None and session.schedule is not None
    own = limits.rewritten
    assert own is not None and own.operators == len(session.schedule.order)
    assert 0 < (own.critical_path_ms or 0) <= (own.busy_ms or 0)
    if known is None:
        assert limits.operators == own.operators + 20  # its batch norms
    else:
        assert replace(limits, rewritten=None, when=None) == known


@pytest.mark.usefixtures("cache_folder")
def test_what_a_scheduler_itself_decides_does_not_rewrite_the_model() -> None:
    measured_cell = Cell(choose("model", "gpt"), choose("system", "ios"), choose("runner", "latency"), Conditions(1, "cpu"))
    session = Session(measured_cell, "0", lambda _: None)
    session.prepare()
    assert session.schedule is not None and {d.kind for d in session.schedule.decisions} == {"ios"}
    assert not session.is_rewritten


ALONE = {
    "latency": {"latency"},
    "throughput": {"throughput"},
    "memory": {"memory"},
    "sm_efficiency": {"sm_efficiency"},
    "limits": {"limits"},
    "active_warps": {"active_warps"},
    "energy": {"measured"},
    "correctness": set(),
}
FIELDS = {*ALONE, "kernels", "measured"} - {"correctness", "energy"}


@pytest.mark.parametrize("runner", list(ALONE))
def test_each_measurement_alone(runner: str) -> None:
    options = {"samples": 3} if runner == "latency" else {}
    chosen = choose("model", "gpt"), choose("system", "eager"), choose("runner", runner, **options)
    measured_cell = Cell(*chosen, Conditions(1, "cpu", "fp32"))
    result = measured(Session(measured_cell, "0", lambda _: None), record(of=measured_cell))
    assert result.is_ok and result.correctness is not None and result.correctness.is_correct
    assert {name for name in FIELDS if getattr(result, name)} == ALONE[runner] and not result.pending


def test_what_needs_a_profiler_is_owed_until_it_is_measured() -> None:
    """Its reasons are for people; what is owed is data."""
    chosen = choose("model", "gpt"), choose("system", "eager"), choose("runner", "sm_efficiency")
    measured_cell = Cell(*chosen, Conditions(1, "cpu", "fp32"))
    session = Session(measured_cell, "0", lambda _: None)
    owing = measured(session, record(of=measured_cell), is_profiled=False)
    assert owing.pending == ("sm_efficiency",) and owing.sm_efficiency is not None
    assert owing.sm_efficiency.reason == NOT_YET
    paid = profiled(session, owing)
    assert paid.pending == () and paid.sm_efficiency is not None and "CPU" in (paid.sm_efficiency.reason or "")
