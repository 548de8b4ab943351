"""The files of runner=schedule and its like: written whole, only where there is something to write, and read back."""

import json
import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import Run, command, environment

from results.files import PARTIAL
from systems.scheduling.plans.schedule import Schedule
from systems.scheduling.plans.verify import InvalidSchedule, verify


@pytest.mark.slow
def test_a_schedule_is_written_whole_and_only_where_there_is_one(run: Run, run_here: Run, folder: Path) -> None:
    arguments = ["runner=schedule", "model=custom", "model.factory=tiny:make", "batch=3"]
    done = run(*arguments, "system=nimble", "output=new/deep/s.json")
    assert done.returncode == 0, done.stderr
    schedule: dict[str, Any] = json.loads((folder / "new" / "deep" / "s.json").read_text())
    assert {k: schedule[k] for k in ("model", "system", "batch", "device")} == {
        **{"model": "custom", "system": "nimble", "batch": 3, "device": "cpu"}
    }
    operators = schedule["operators"]
    assert [o["id"] for o in operators] == list(range(len(operators)))
    assert sorted(o["position"] for o in operators) == list(range(len(operators)))
    assert len({o["stream"] for o in operators}) == schedule["streams"] == schedule["width"] == 2
    assert all(set(o) == {"id", "name", "target", "stream", "position"} for o in operators)
    assert {tuple(w) for w in schedule["waits"]} <= {tuple(e) for e in schedule["edges"]}
    assert set(schedule["search"]) >= {"seconds", "states", "transitions"}
    printed = run_here(*arguments, "system=nimble")
    assert json.loads(printed.stdout) | {"search": 0} == schedule | {"search": 0}
    none = run_here(*arguments, "system=eager", "output=none.json")
    reason = "opweave: eager on custom: unsupported: eager has no schedule of operators\n"
    assert none.returncode == 2 and none.stderr == reason and not (folder / "none.json").exists()
    shown = run_here(*arguments, "system=eager")
    assert shown.returncode == 0 and shown.stderr == reason and shown.stdout == ""
    assert not (folder / "results").exists()


@pytest.mark.parametrize("runner", ["simulate", "timeline"])
def test_a_file_that_nothing_can_be_written_to_is_told_by_the_status(run_here: Run, folder: Path, runner: str) -> None:
    """Of systems that cannot show it: here a GPU is needed, or a schedule."""
    arguments = [f"runner={runner}", "model=custom", "model.factory=tiny:make", "device=cpu"]
    done = run_here("-m", *arguments, "system=cuda_graph,vllm", "output=new/none.json")
    assert done.returncode == 2 and done.stderr.count(": unsupported: ") == 2 and not (folder / "new").exists(), done.stderr
    assert run_here(*arguments, "system=cuda_graph").returncode == 0


def test_a_schedule_file_reads_back_and_passes_the_proof(run_here: Run, folder: Path) -> None:
    (folder / "ordered.py").write_text(
        "import torch\n"
        "class Ordered(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        a, b, c = x.relu(), x.tanh(), x.sigmoid()\n"
        "        return torch.cat((c - a, b - a, b)), a * a\n"
        "def make(batch): return Ordered(), (torch.randn(batch, 3),)\n"
    )
    done = run_here("runner=schedule", "model=custom", "model.factory=ordered:make", "system=nimble", "output=s.json")
    assert done.returncode == 0, done.stderr
    document = json.loads((folder / "s.json").read_text())
    ids = {o["target"].split(".")[1]: o["id"] for o in document["operators"]}
    a, b, c, joined = (ids[name] for name in ("relu", "tanh", "sigmoid", "cat"))
    first, second = (o["id"] for o in document["operators"] if ".sub." in o["target"])
    edges = [tuple(edge) for edge in document["edges"]]
    by_consumer = {v: [u for u, w in edges if w == v] for v in (first, second, joined)}
    assert by_consumer == {first: [c, a], second: [b, a], joined: [first, second, b]}  # in the order of the arguments
    assert all(u < v for u, v in edges) and len(set(edges)) == len(edges)

    schedule = Schedule.from_json(document)
    verify(schedule.graph, schedule)
    again = schedule.to_json(**{key: document[key] for key in ("model", "batch", "device")})
    assert again == {key: value for key, value in document.items() if key != "cell"}
    assert schedule.waits
    for wait in schedule.waits:  # every one of them is needed
        fewer = replace(schedule, waits=tuple(w for w in schedule.waits if w != wait))
        with pytest.raises(InvalidSchedule):
            verify(fewer.graph, fewer)


def test_a_killed_run_of_a_schedule_leaves_the_old_file(folder: Path) -> None:
    (folder / "s.json").write_text("old")
    arguments = ["runner=schedule", "model=custom", "model.factory=tiny:make", "output=s.json"]
    for seconds in (0.6, 1.5):
        process = subprocess.Popen(command(*arguments), cwd=folder, env=environment(), stderr=subprocess.DEVNULL)
        time.sleep(seconds)
        process.kill()
        process.wait()
        assert (folder / "s.json").read_text() == "old"
    assert not [name for name in os.listdir(folder) if name.endswith(PARTIAL)]
