"""Sweeps through Hydra's launchers: a real Ray on this machine, and submitit's local executor."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Run, command
from drawing import examples
from hydra import compose, initialize_config_dir
from hypothesis import given
from hypothesis import strategies as st
from launched import ASKED, begun, complete, jobs_of_cells, prepare, shell_of
from made_records import ENVIRONMENT, record
from omegaconf import OmegaConf

from hydra_plugins.opweave_launchers import LocalLauncher, OpweaveLauncher, RayLauncher
from results.cell import Cell, Conditions, choose
from results.store import Store, write_json
from runners.checks import BadRequest
from runners.request.request import Request
from runners.request.resolve import resolve
from runners.sweep import launch
from runners.sweep.jobs import JobGroup, Jobs, Outcome, read_outcome
from runners.sweep.launch import Launch, grouped, meeting_place

RAY = ["hydra/launcher=ray", "hydra.launcher.remote.num_gpus=0"]
SMALL_RAY = [f"+hydra.launcher.init.{key}" for key in ("num_cpus=2", "include_dashboard=false")]
ray = pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: pip install '.[distributed]'")
submitit = pytest.mark.skipif(
    find_spec("submitit") is None, reason="submitit is not installed: pip install '.[distributed]'"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return prepare(tmp_path)


@pytest.fixture
def shell(folder: Path) -> Iterator[dict[str, str]]:
    """The environment of a sweep whose Ray, if it starts one, is its own. Sockets need a short path."""
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as short:
        yield shell_of(folder, RAY_TMPDIR=short, RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled")


@pytest.mark.slow
@ray
def test_a_sweep_on_ray_ends_complete_though_a_worker_is_killed(folder: Path, shell: dict[str, str]) -> None:
    with begun(folder, shell, *RAY, *SMALL_RAY, "system=eager,torchscript", "batch=1,2", "rounds=1") as process:
        worker = next(iter(jobs_of_cells(folder).values()))
        assert any("ray" in part for part in worker.cmdline()), worker.cmdline()
        worker.send_signal(signal.SIGKILL)
        (folder / "wait").unlink()
        out, err = process.communicate(timeout=280)
        assert process.returncode == 0, err
        complete(folder, (1, 2))
        assert "over eager" in out and err.count("done on") == 2 and "validated against" not in err


@pytest.mark.slow
@submitit
def test_a_sweep_through_submitit_ends_complete_though_a_job_is_killed(folder: Path, shell: dict[str, str]) -> None:
    with begun(folder, shell, "hydra/launcher=submitit_local", "system=eager,torchscript", "batch=1", "rounds=1") as process:
        (job,) = jobs_of_cells(folder).values()
        assert any("submitit" in part for part in job.cmdline()), job.cmdline()
        job.send_signal(signal.SIGKILL)
        (folder / "wait").unlink()
        out, err = process.communicate(timeout=280)
        assert process.returncode == 0, err
        complete(folder, (1,))
        assert "over eager" in out and "launched again" in err


@submitit
@pytest.mark.parametrize(("queue", "ended"), [("7_0\n7_1\n", set()), ("7_1\n", {"7_0"}), ("", {"7_0", "7_1"})])
def test_a_job_that_slurm_has_no_more_in_its_queue_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, queue: str, ended: set[str]
) -> None:
    """And one that may be in it has not, while squeue has no answer. Only squeue is played."""
    from runners.sweep.slurm_queue import QueueWatcher

    (tmp_path / "squeue").write_text(f"#!/bin/sh\n[ -e {tmp_path}/down ] && exit 1\nprintf '{queue}'\n")
    (tmp_path / "squeue").chmod(0o755)
    (tmp_path / "down").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    watcher = QueueWatcher()
    for job in ("7_0", "7_1"):
        watcher.register_job(job)
        assert not watcher.is_done(job, mode="force")
    (tmp_path / "down").unlink()
    watcher.update()
    assert {job for job in ("7_0", "7_1") if watcher.is_done(job, mode="cache")} == ended
    assert (watcher._make_command() is None) == (len(ended) == 2)  # nothing is left to ask for


class PlayedCluster:
    """Ray, or submitit's executor, whose jobs are all lost; and in one list what is asked of them."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def submit_array(self, jobs: Sequence[Any]) -> list["PlayedCluster"]:
        return [self for _ in jobs]

    def is_initialized(self) -> bool:
        return True

    def remote(self, _: Any = None) -> Any:
        return self

    __call__ = remote  # what ray.remote(...) makes is called with a function, and gives what has .remote

    def wait(self, tasks: Sequence[Any] = ("one",), num_returns: int = 1) -> None:
        self.calls += ["wait"] * num_returns

    def result(self, _: Any = None) -> None:
        self.calls.append("result")
        raise RuntimeError("a job was killed")

    get = result


@pytest.mark.parametrize("name", ["submitit", "ray"])
def test_a_lost_job_is_told_once_all_have_ended(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    played = PlayedCluster()
    launcher: OpweaveLauncher = LocalLauncher(submitit_folder=".")
    if name == "ray":
        monkeypatch.setitem(sys.modules, "ray", played)
        launcher = RayLauncher(OmegaConf.create(), OmegaConf.create())
    else:
        monkeypatch.setattr(launcher, "executor", lambda: played)
    with pytest.raises(RuntimeError, match="a job was killed"):
        launcher.run([object()] * 3)  # type: ignore[list-item]
    assert played.calls == ["wait"] * 3 + ["result"]


@submitit
def test_what_only_a_node_can_tell_is_told_in_a_line(folder: Path, shell: dict[str, str]) -> None:
    command_line = command(*ASKED, "hydra/launcher=submitit_local", "system=eager", "device=cuda")
    done = subprocess.run(command_line, cwd=folder, env=shell, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "device=cuda, but no CUDA device is visible here" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hydra/launcher=ray", "runner=schedule"], "keeps no record and runs here"),
        (["hydra/launcher=ray", "batch=0,1"], "batch=0 is not a positive integer"),
        (["hydra/launcher=ray", "device=gpu"], "device=gpu is not one of auto, cpu, cuda"),
        (["hydra/launcher=ray", "system=nimbel,eager"], "no system is named 'nimbel'"),
        (["hydra/launcher=ray", "timeout=5,6"], "timeout holds for a whole sweep"),
    ],
)
@ray
def test_a_bad_request_is_told_before_anything_is_launched(run_here: Run, arguments: list[str], message: str) -> None:
    done = run_here("-m", *arguments)
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_a_launcher_is_for_sweeps(run_here: Run) -> None:
    done = run_here("hydra/launcher=submitit_local", "model=squeezenet", "device=cpu")
    assert done.returncode == 2 and done.stderr == "opweave: hydra/launcher is for sweeps: add -m\n"


@pytest.mark.skipif(find_spec("ray") is not None, reason="ray is installed")
def test_a_launcher_that_is_not_installed_is_named(run: Run) -> None:
    done = run("-m", "hydra/launcher=ray", "model=squeezenet", "device=cpu")
    assert done.returncode == 2 and done.stderr.startswith("opweave: hydra/launcher=ray needs ray: pip install")


def requested(*overrides: str) -> Request:
    """What these overrides ask for, with the device as it was asked for."""
    with initialize_config_dir(config_dir=str(ROOT / "conf"), version_base="1.3"):
        config = compose("config", overrides=list(overrides), return_hydra_config=True)
    return resolve(config, config.hydra.runtime.choices)


@pytest.fixture(scope="module")
def plain() -> Request:
    return requested("device=cpu")


CELLS = st.fixed_dictionaries(
    {
        "batch": st.integers(1, 3),
        "precision": st.sampled_from(["tf32", "fp16"]),
        "device": st.sampled_from(["auto", "cpu", "cuda"]),
        "model": st.sampled_from(["nasnet", "vgg16"]),
        "system": st.sampled_from(["eager", "cuda_graph", "torchscript"]),
    }
)


@examples(50)
@given(st.lists(CELLS, min_size=1, max_size=12))
def test_cells_of_one_ratio_are_in_one_group(plain: Request, cell_options: list[dict[str, Any]]) -> None:
    requests = []
    for c in cell_options:
        chosen = choose("model", c["model"]), choose("system", c["system"]), plain.cells[0].runner
        cell = Cell(*chosen, Conditions(c["batch"], c["device"], c["precision"]))
        requests.append(([f"{k}={v}" for k, v in c.items()], Request((cell,), plain.options)))
    groups = grouped(requests)
    for group in groups:
        assert len({cell.group for cell in group.request.cells}) == 1
        first = next(overrides for overrides, request in requests if request.cells[0].group == group.request.cells[0].group)
        assert group.overrides == tuple(first)  # it names the job
    keys = [group.request.cells[0].group for group in groups]
    assert len(set(keys)) == len(keys)
    together = [cell for group in groups for cell in group.request.cells]
    assert len(set(together)) == len(together)
    assert set(together) == {cell for _, request in requests for cell in request.cells}


def test_the_device_is_decided_where_the_job_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runners.request.request.cuda_device_count", lambda: 0)
    for device in ("auto", "cuda", "cpu"):
        request = requested(f"device={device}", "gpus=all")
        assert (request.cells[0].device, request.options.gpus) == (device, None)
    assert requested("gpus=[3,5]").options.gpus == (3, 5)
    with pytest.raises(BadRequest, match="device=gpu"):
        requested("device=gpu")
    with pytest.raises(BadRequest, match="no CUDA device is visible here"):
        requested("device=cuda").decided()
    assert requested("device=auto", "gpus=all").decided().cells[0].device == "cpu"
    monkeypatch.setattr("runners.request.request.cuda_device_count", lambda: 2)
    there = requested("device=auto", "gpus=all").decided()
    assert there.cells[0].device == "cuda" and there.options.gpus == (0, 1)
    with pytest.raises(BadRequest, match="GPUs are numbered 0 to 1 here"):
        requested("device=auto", "gpus=[2]").decided()


def test_the_choice_is_what_was_asked_for() -> None:
    """Though two files share a name, and whatever the options come to."""
    (cell,) = requested("system=nimble_fused", "model=bert", "model.layers=2", "runner=latency").cells
    assert (cell.system.choice, cell.system.name, cell.system.label) == ("nimble_fused", "nimble", "nimble_fused")
    assert cell.model.label == "bert (layers=2)" and cell.runner.get("samples") == 100


class Unreliable:
    """A launcher in this process: `fails` of the jobs are lost at each attempt, the first ones of those that are left."""

    def __init__(self, fails: Sequence[int]):
        self.fails, self.launched = list(fails), []

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        self.jobs = task_function

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> None:
        self.launched.append([overrides[0] for overrides in job_overrides])
        lost = self.fails.pop(0)
        for number in range(lost, len(job_overrides)):
            self.jobs.play(number)
        for number in range(lost):
            self.jobs.begin(number)
        if lost:
            raise RuntimeError("a job was killed")


class PlayedJobs(Jobs):
    """Jobs whose sweep is played: a record for each cell, on a host named after its group."""

    def play(self, number: int) -> None:
        group = self.numbers[number]
        self.begin(number)
        outcome = {"host": f"node{group}", "status": 0, "records": [], "bad_request": None}
        write_json(self.folder / f"{group}.outcome", outcome)

    def begin(self, number: int) -> None:
        (self.folder / f"{self.numbers[number]}.log").touch()


def launched(plain: Request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: list[int]) -> tuple[Launch, Unreliable]:
    monkeypatch.setattr(launch, "Jobs", PlayedJobs)
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    launcher, (cell,) = Unreliable(fails), plain.cells
    options = replace(plain.options, results=tmp_path / "r")
    batches = [replace(cell, conditions=replace(cell.conditions, batch=batch)) for batch in (1, 2, 3)]
    groups = [JobGroup((f"batch={c.batch}",), Request((c,), options)) for c in batches]
    with_hydra = OmegaConf.create({"hydra": {"sweep": {"dir": "multirun", "subdir": "0"}}})
    place = meeting_place(groups, with_hydra)
    return Launch(launcher, None, with_hydra, "unreliable", groups, place), launcher  # type: ignore[arg-type]


def test_only_what_was_lost_is_launched_again(
    plain: Request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launching, launcher = launched(plain, tmp_path, monkeypatch, [2, 1, 0])
    assert launching.run() == 0
    assert launcher.launched == [["batch=1", "batch=2", "batch=3"], ["batch=1", "batch=2"], ["batch=1"]]
    messages = capsys.readouterr().err
    assert messages.count("launched again") == 2 and all(f"nasnet b{n + 1}: done on node{n}" in messages for n in range(3))
    assert not launching.folder.exists()


def test_a_job_that_is_always_lost_ends_the_sweep_with_status_1(
    plain: Request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launching, launcher = launched(plain, tmp_path, monkeypatch, [1, 1, 1])
    assert launching.run() == 1
    assert launcher.launched == [["batch=1", "batch=2", "batch=3"], ["batch=1"], ["batch=1"]]
    assert "nasnet b1: no job for it came to its end" in capsys.readouterr().err
    assert (launching.folder / "0.log").exists()


def test_a_launcher_that_begins_no_job_is_a_bad_request(
    plain: Request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launching, launcher = launched(plain, tmp_path, monkeypatch, [0])

    def refuse(job_overrides: Any, initial_job_idx: int) -> None:
        raise ValueError("there is\nno such partition")

    monkeypatch.setattr(launcher, "launch", refuse)
    with pytest.raises(BadRequest, match="hydra/launcher=unreliable: there is no such partition"):
        launching.run()
    assert not launching.folder.exists()


def test_records_that_are_not_here_are_told_and_are_status_1(
    plain: Request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where a node writes to a disk of its own. The folder of the launch stays, with the logs."""

    class Elsewhere(PlayedJobs):
        def play(self, number: int) -> None:
            super().play(number)
            file = self.folder / f"{self.numbers[number]}.outcome"
            write_json(file, json.loads(file.read_text()) | {"records": ["0123456789abcdef"]})

    launching, _ = launched(plain, tmp_path, monkeypatch, [0])
    monkeypatch.setattr(launch, "Jobs", Elsewhere)
    assert launching.run() == 1 and launching.folder.exists()
    assert "nasnet b1: measured on node0, but not all of its records are in" in capsys.readouterr().err


def test_a_job_whose_group_has_ended_meanwhile_runs_nothing(
    plain: Request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher may have given up a job that goes on, and launched its group again."""
    monkeypatch.chdir(tmp_path)
    jobs = Jobs([JobGroup((), plain)], [0], tmp_path)
    monkeypatch.setattr("runners.sweep.jobs.HydraConfig.get", lambda: OmegaConf.create({"job": {"num": 0}}))
    monkeypatch.setattr(Jobs, "run", lambda *_: Outcome("here", 0, [os.environ["OMP_NUM_THREADS"]]))
    jobs.settings = {"OMP_NUM_THREADS": "3"}  # of the shell that asked, whatever a launcher sets
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    jobs(OmegaConf.create({}))
    assert read_outcome(tmp_path, 0) == Outcome("here", 0, ["3"])
    monkeypatch.setattr(Jobs, "run", lambda *_: pytest.fail("it has run again"))
    jobs(OmegaConf.create({}))


def test_records_of_two_machines_share_a_folder(tmp_path: Path) -> None:
    """The same cell of two hosts, and of two GPUs, is four records, none of which is found for another's."""
    places = [replace(ENVIRONMENT, host=host, gpu=gpu) for host in ("a", "b") for gpu in ("H200", "V100")]
    store = Store(tmp_path)
    for place in places:
        store.write(record("eager", environment=place))
    assert len(list(tmp_path.glob("*.json"))) == 4 and len(store.read().records) == 4
    for place in places:
        stored_record = store.find(record("eager", environment=place).id)
        assert stored_record is not None and stored_record.environment == place


def test_an_outcome_is_read_whole_or_not_at_all(tmp_path: Path) -> None:
    assert read_outcome(tmp_path, 0) is None
    write_json(tmp_path / "0.outcome", {"host": "a", "status": 1, "records": ["x"], "bad_request": None})
    outcome = read_outcome(tmp_path, 0)
    assert outcome is not None and (outcome.host, outcome.status, outcome.records) == ("a", 1, ["x"])
