"""runner=simulated: costs of stages, and records of what was served under a virtual clock."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from conftest import Run
from made_records import record

from results.cell import Cell, Conditions, choose
from results.document import part_from_json
from results.files import read_json
from results.quantity import Measured
from results.serving import Serving
from results.store import Store
from runners.cell.measuring import measured
from runners.checks import BadRequest
from runners.measurements.capacity import Capacity
from runners.measurements.registry import plan
from runners.measurements.serving import ServingMeasurement
from runners.serving.options import costs_file
from runners.serving.simulated_session import SimulatedSession
from runners.serving.traffic import Seen
from runners.serving.workload import Arrival
from systems.base import BadOption
from systems.serving.batch import Batch, Row
from systems.serving.costs import CostTable
from systems.serving.parts import Parts
from systems.serving.reductions import Reductions
from systems.serving.request import Sampling
from systems.serving.slots import Region
from systems.serving.stage_costs import StageCosts

SUMS = Reductions(2, (1000, 3000, 5000), (1.0, 2.0, 4.0))


DIRECT = replace(SUMS, kind="direct")


COSTS = StageCosts(
    "H",
    2**40,
    "fp32",
    (4, 128, 8, 2048, 512),
    Parts(2, 8),
    512,
    CostTable((1, 4), (1.0, 4.0), 0.0, (0.5, 2.0)),
    DIRECT,
)


def rows_of(num_tokens: int) -> Batch:
    row = Row(0, Region((0,), 100, 100), 0, (0,), 0, 1, 0, Sampling())
    return Batch(0, (row,) * num_tokens)


def test_sums_over_more_gpus_load_a_link_as_a_larger_tensor_does() -> None:
    assert SUMS(1000, 2) == 1.0 and SUMS(4000, 2) == 3.0 and SUMS(6000, 2) == 5.0 and SUMS(10, 2) == 1.0
    assert SUMS(2000, 4) == SUMS(3000, 2)  # 3/4 of the bytes twice, beside 1/2
    assert SUMS(2000, 8) == SUMS(3500, 2)


def test_a_gpu_that_sums_by_itself_reads_as_many_parts_as_there_are_others() -> None:
    assert DIRECT(1000, 2) == SUMS(1000, 2) and DIRECT(1000, 4) == SUMS(3000, 2) > SUMS(1000, 4)


def test_a_stage_costs_its_part_and_two_sums_a_layer() -> None:
    for num_tokens in (1, 4, 8):
        expected = num_tokens * 1.0 + 2 * (4 / 2) * DIRECT(num_tokens * 512, 8)
        assert COSTS(rows_of(num_tokens)) == pytest.approx(expected)
    assert replace(COSTS, parts=Parts(2, 1), reductions=None)(rows_of(4)) == 4.0 and COSTS.delay(rows_of(2)) == 1.0


def test_costs_are_read_as_they_were_written() -> None:
    with_loop = replace(COSTS, table=replace(COSTS.table, loop_s=0.25, loop_row_s=0.5))
    for costs_of_stage in (COSTS, with_loop, replace(COSTS, reductions=SUMS), replace(COSTS, reductions=None)):
        assert part_from_json(json.loads(costs_of_stage.to_json()), StageCosts) == costs_of_stage


def test_committed_costs_are_named(tmp_path: Path) -> None:
    """A file of that name wins over a committed one."""
    assert "NVIDIA H200" in part_from_json(read_json(costs_file("gpt_13b-h200")), StageCosts).device
    (tmp_path / "gpt_13b-h200").write_text("{}")
    assert costs_file(str(tmp_path / "gpt_13b-h200")) == tmp_path / "gpt_13b-h200"
    with pytest.raises(BadRequest, match=r"runner.costs=gpt_31b-h200 is not a file.*committed are .*gpt_13b-h200"):
        plan(choose("runner", "simulated", costs="gpt_31b-h200"))


def simulated_session(folder: Path, costs_of_stage: StageCosts, slots: int = 4000, **options: object) -> SimulatedSession:
    file = folder / "costs.json"
    file.write_text(costs_of_stage.to_json())
    parts = costs_of_stage.parts
    splits = {"pipeline_parallel": parts.pipeline, "tensor_parallel": parts.tensor}
    system = choose("system", "orca", max_batch_size=4, slots=slots, **splits)
    runner = choose("runner", "simulated", costs=str(file), **{"requests": 30, "rate": 0.01, **options})  # type: ignore[arg-type]
    model = choose("model", "gpt", heads=8)
    session = SimulatedSession(Cell(model, system, runner, Conditions(1, "cpu", "fp32")), "0", lambda phase: None)
    session.prepare()
    return session


def test_a_simulated_record_says_so_everywhere(tmp_path: Path) -> None:
    part = ServingMeasurement(choose("runner", "simulated")).measure(simulated_session(tmp_path, COSTS))
    assert isinstance(part, Serving) and part.clock == "virtual" and part.quantities
    assert all(
        "simulated" in str(quantity.source) and "measured on H" in str(quantity.source) for quantity in part.quantities
    )
    rate = Capacity(choose("runner", "simulated")).measure(simulated_session(tmp_path, COSTS))
    assert isinstance(rate, Measured) and all("simulated" in str(quantity.source) for quantity in rate.quantities)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("token_bytes", None, "None is not int"),
        ("table", {"tokens": "x"}, "table"),
        ("parts", [1, 1], "parts"),
        ("more", 1, "more"),
    ],
)
def test_a_file_that_holds_no_costs_is_one_line(tmp_path: Path, key: str, value: object, words: str) -> None:
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(json.loads(COSTS.to_json()) | {key: value}))
    runner = choose("runner", "simulated", costs=str(file))
    cell = Cell(choose("model", "gpt", heads=8), choose("system", "orca"), runner, Conditions(1, "cpu", "fp32"))
    with pytest.raises(BadOption, match=f"is not a file of runner=iteration_costs: .*{words}") as caught:
        SimulatedSession(cell, "0", lambda phase: None)
    assert "\n" not in str(caught.value)


def test_what_else_the_machine_does_slows_no_virtual_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runners.machine.cpu_load.CpuLoad.share_of_others", lambda _: 0.9)
    session = simulated_session(tmp_path, COSTS)
    made = measured(session, replace(record(of=session.cell), warnings=()))
    assert made.is_ok and made.serving is not None and made.warnings == ()


def test_a_simulated_rate_has_a_trace_of_each_seed(tmp_path: Path) -> None:
    one, three = (simulated_session(tmp_path, COSTS, repeats=repeats).try_rate(1e-7) for repeats in (1, 3))
    assert one.trace_ms == three.trace_ms[:1] and len({*three.trace_ms}) == 3
    assert three.normalized_ms == median(filter(None, three.trace_ms))


def test_a_simulated_rate_is_that_of_its_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As drawn they come at others, whatever the rate."""
    session = simulated_session(tmp_path, COSTS, requests=30, repeats=2)
    last_s: list[float] = []
    simulate = session.simulate

    def noting(trace: tuple[Arrival, ...], seed: str) -> Seen:
        last_s.append(trace[-1].due_s)
        return simulate(trace, seed)

    monkeypatch.setattr(session, "simulate", noting)
    assert session.try_rate(4.0).rate == 4.0 and last_s == pytest.approx([29 / 4] * 2)


def test_a_request_alone_that_no_slots_hold_is_refused(tmp_path: Path) -> None:
    few = simulated_session(tmp_path, COSTS, 150, prompt_tokens=8, new_tokens=4)
    with pytest.raises(BadOption, match=r"128 prompt .* more than the 150 K/V slots; or say an SLO"):
        Capacity(choose("runner", "simulated")).measure(few)


def test_a_stage_more_is_a_latency_more_and_no_throughput_less(tmp_path: Path) -> None:
    """A request alone goes through both stages; many keep both busy."""
    table = CostTable((1, 2), (0.001, 0.001), 0.0)  # whatever the tokens
    one = replace(COSTS, parts=Parts(1, 1), table=table, reductions=None)
    alone_ms = [simulated_session(tmp_path, each).alone_ms(8, 16) for each in (one, replace(one, parts=Parts(2, 1)))]
    assert alone_ms == pytest.approx([1.0, 2.0])
    saturated = [
        simulated_session(tmp_path, each, rate=1e6, requests=200).try_rate(1e6).throughput
        for each in (one, replace(one, parts=Parts(2, 1)))
    ]
    assert saturated[1] == pytest.approx(saturated[0], rel=0.1)  # a batch for each time of a stage, with as many stages busy


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"shape": (5, 128, 8, 2048, 512)}, "is of another model, split or precision: 5 layers of 128"),
        ({"reductions": SUMS}, "system.reductions=direct, but the sums that were measured are nccl"),
        ({"precision": "fp16"}, "precision=fp16$"),
        ({"reductions": None}, "the sums over parts were not measured"),
    ],
)
def test_costs_of_something_else_are_refused(changes: dict[str, object], says: str, tmp_path: Path) -> None:
    with pytest.raises(BadOption, match=says):
        simulated_session(tmp_path, replace(COSTS, **changes))  # type: ignore[arg-type]


def test_what_does_not_fit_is_not_simulated(tmp_path: Path) -> None:
    with pytest.raises(MemoryError, match=r"^rank 0 of 16"):
        simulated_session(tmp_path, replace(COSTS, gpu_bytes=2**20))


def test_slots_that_do_not_fit_are_not_simulated(tmp_path: Path) -> None:
    """Each part has 2 of the 4 layers and one head of 16: a slot is 256 bytes."""
    most = 20_000_000  # 4.8 GiB beside weights
    simulated_session(tmp_path, replace(COSTS, gpu_bytes=5 * 2**30), most)
    with pytest.raises(BadOption, match=r"^system.slots=21000000 take 5.0 GiB, and 5.0 are free: there is room for 20"):
        simulated_session(tmp_path, replace(COSTS, gpu_bytes=5 * 2**30), 21_000_000)
    parts = replace(COSTS, gpu_bytes=5 * 2**30, parts=Parts(), reductions=None)
    with pytest.raises(BadOption, match=rf"^system.slots={most} take 76.3 GiB"):
        simulated_session(tmp_path, parts, most)


@pytest.mark.slow
def test_costs_of_a_part_are_measured_and_simulated(run: Run, tmp_path: Path) -> None:
    """The command lines, with a simulation that costs what the file says."""
    options = [
        "model=gpt",
        "model.heads=8",
        "system=orca",
        "system.tensor_parallel=4",
        "system.max_batch_size=4",
        "device=cpu",
    ]
    done = run("runner=iteration_costs", *options, f"output={tmp_path / 'costs.json'}")
    assert done.returncode == 0, done.stderr
    costs_of_stage = part_from_json(read_json(tmp_path / "costs.json"), StageCosts)
    assert costs_of_stage.parts == Parts(1, 4) and costs_of_stage.reductions is not None and costs_of_stage.device == "cpu"
    assert costs_of_stage.delay_parts == Parts(1, 2)
    assert max(costs_of_stage.table.seconds) > 0 and min(costs_of_stage.reductions.seconds) > 0
    load = [
        "runner.requests=1",
        "runner.prompt_tokens=1-1",
        "runner.new_tokens=1-1",
        f"runner.costs={tmp_path / 'costs.json'}",
    ]
    done = run("runner=simulated", *options, *load, f"results={tmp_path / 'r'}")
    assert done.returncode == 0 and "(simulated)" in done.stdout, done.stderr
    (record,) = Store(tmp_path / "r").read().records.values()
    assert record.serving is not None and record.serving.clock == "virtual"
    requests = record.serving.traces[0].requests
    latency_s = requests.token_s[0][0] - requests.due_s[0]
    assert latency_s == pytest.approx(costs_of_stage(rows_of(1)) + costs_of_stage.delay(rows_of(1)), rel=1e-6)
