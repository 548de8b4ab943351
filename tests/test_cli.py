"""The command line: what it answers to requests, right and wrong."""

import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from completion import completions
from conftest import ROOT, Run, command, environment, records

from results.cell import Cell, choose
from runners.cell.messages import Check, Refused
from runners.cell.worker import Worker, guarded
from runners.command import composed
from scripts.exhibits.preset import Preset, names
from scripts.exhibits.running import Run as Exhibit

BAD_REQUESTS = [  # what is asked, and what the one line must say
    ("model=nasne", "no model is named 'nasne': did you mean nasnet?"),
    ("model=", "no model is named ''"),
    ("model=null", "take a name each"),
    ("model=[nasnet,vgg16]", "-m"),
    ("model=nasnet,vgg16", "-m"),
    ("model={a: 1}", "model takes a name"),
    ("system=nimbel", "did you mean nimble?"),
    ("runner=benhc", "did you mean bench?"),
    ("experiment=reference/zo", "did you mean reference/zoo?"),
    ("bach=1", "no key 'bach': did you mean batch?"),
    ("+bach=1", "did you mean batch?"),
    ("+batch=1", "write batch=... without the plus sign"),
    ("~batch", "batch=..."),
    ("~runner.samples", "runner.samples=..."),
    ("system.multistream=false", "did you mean system.multi_stream?"),
    ("multi_stream=false", "did you mean system.multi_stream?"),
    ("sytem.multi_stream=false", "did you mean system.multi_stream?"),
    ("model.factory=tiny:make", "model.factory"),
    ("system.multi_stream=maybe", "true or false"),
    ("runner.samples=0", "positive integer"),
    ("runner.measurements=latencies", "did you mean latency?"),
    ("runner.measurements=", "runner.measurements= names no measurement"),
    ("runner=training runner.measurements=energy", "is not one of active_warps, correctness, kernels, latency,"),
    ("runner=energy runner.energy_s=0", "above 0 and up to 20"),
    ("runner=training runner.optimizer=adam", "did you mean adamw?"),
    ("runner=training runner.learning_rate=-1", "runner.learning_rate=-1.0 is not a number of at least 0"),
    ("runner=training runner.weight_decay=inf", "runner.weight_decay=inf is not a number of at least 0"),
    ("system.name=ios", "choose another system"),
    ("system.multi_stream=[true]", "not a single value"),
    ("runner=schedule runner.samples=5", "it is one of runner=bench, engine, latency, training"),
    ("system=eager system.strategy=both", "it is one of system=greedy, ios,"),
    ("batch=0", "positive integer"),
    ("batch=-1", "positive integer"),
    ("batch=two", "positive integer"),
    ("batch=1.5", "positive integer"),
    ("batch=null", "positive integer"),
    ("batch=10000000000000000000000", "batch=1e+22 is more than a record holds: 1e+19 at most"),
    ("model=gpt system=orca runner=serving runner.rate=1e308", "runner.rate=1e+308 is more than a record holds"),
    ("model=gpt system=orca runner=serving runner.concurrency=4 runner.rate=8", "nothing reads runner.rate=8.0: "),
    ("=", "'=' is not of the form key=value"),
    ("batch=true", "positive integer"),
    ("batch=${nothing}", "nothing"),
    ("batch=[1", "key=value"),
    ("batch", "key=value"),
    ("rounds=-1", "at least 0"),
    ("seed=x", "at least 0"),
    ("seed=9223372036854775808", "more than 9223372036854775807"),
    ("-m hydra/launcher=rai", "did you mean ray?"),
    ("-m hydra.launcher.partition=gpu", "choose hydra/launcher=ray or submitit_local or submitit_slurm first"),
    ("-m hydra/launcher=submitit_slurm hydra.launcher.partitoin=gpu", "did you mean hydra.launcher.partition?"),
    ("-m hydra/launcher=submitit_local hydra.launcher.gpu=1", "there is hydra.launcher.name, hydra.launcher.nodes,"),
    ("-m hydra/launcher=ray hydra.launcher.remote.num_gpu=1", "did you mean hydra.launcher.remote.num_gpus?"),
    ("-m hydra/launcher=ray hydra.launcher.init.runtime=1", "+hydra.launcher.init.runtime=... adds it to init"),
    ("timeout=0", "positive number of seconds"),
    ("timeout=nan", "positive number of seconds"),
    ("memory_gib=0", "memory_gib=0 is neither a positive number of GiB nor null"),
    ("memory_gib=inf", "memory_gib=inf is neither"),
    ("memory_gib=8GB", "memory_gib=8GB is neither"),
    ("memory_gib=true", "memory_gib=True is neither"),
    ("precision=fp8", "fp32, tf32, tf32_products, fp16, bf16"),
    ("algorithms=benchmark", "heuristic, timed"),
    ("layout=nhwc", "channels_last"),
    ("device=gpu", "auto, cpu, cuda"),
    ("device=cuda", "no CUDA device"),
    ("gpus=[0,0]", "gpus"),
    ("gpus=0,0", "gpus=[0, 0] "),
    ("-m gpus=0,0", "gpus=[0, 0] "),
    ("gpus=0,1", "gpus=[0, 1] names GPUs, and device=cpu takes none: leave it out"),
    ("device=auto gpus=1", "gpus=[1] names GPUs, and device=cpu takes none"),
    ("max_load=1.5", "max_load=1.5 is not a share from 0 to 1"),
    ("force=maybe", "true nor false"),
    ("results=null", "not a path"),
    ("results=tiny.py", "not a folder"),
    ("results=tiny.py/deeper", "not a folder"),
    ("--no-such-flag", "unrecognized arguments: --no-such-flag"),
    ("--experimental-rerun=x.pickle", "which can run code"),
    ("-m batch=1,2,0", "positive integer"),
    ("-m model=nasnet,vgg16,nasne", "did you mean nasnet?"),
    ("batch=1,0 -m", "positive integer"),
    ("-m rounds=1,2", "one value"),
    ("model=nasnet,vgg16", "names several values: add -m"),
    ("runner.measurements=memory,latency", 'write "runner.measurements=memory latency" for all of them'),
    ("-m max_cells=1,2", "one value"),
    ("-m batch=range(1,1000000000)", "asks for 999,999,999 cells, and max_cells=1000"),
    ("-m batch=glob(*)", "batch=glob(*) names no value"),
    ("-m runner=bench,schedule", "runner=schedule"),
    ("model=custom", "model.factory=package.module:function"),
    ("runner=latency output=x.json", "records go to the folder results=..."),
    ("runner=list output=x.json", "runner=list writes none"),
    ("runner=list model=nasnet", "model= changes nothing of what runner=list shows: it takes the keys device, gpus,"),
    ("runner=list system=ios system.r=3", "system= changes nothing of what runner=list shows"),
    ("-m runner=list batch=1,2", "batch= changes nothing of what runner=list shows"),
    ("runner=cache precision=fp16", "= changes nothing of what runner=cache shows: it takes its own options alone"),
    ("runner=schedule output=.", "a folder"),
    ("runner=schedule output=tiny.py/schedule.json", "not a folder"),
    ("runner=schedule output=/dev/null", "not a file"),
    ("-m runner=schedule output=a.json batch=1,2", "one file"),
]
BAD_FACTORIES = [
    ("tiny:mak", "did you mean make"),
    ("tinny:make", "no module tinny"),
    ("tiny", "not of the form"),
    ("tiny:number", "not a function"),
    ("tiny:raises", "no such thing"),
    ("tiny:none", "returned None"),
    ("tiny:no_module", "returned an int first"),
    ("tiny:no_tensor", "returned an int as input 0"),
]


def refused(done: "subprocess.CompletedProcess[str]", folder: Path, before: list[str]) -> str:
    """The one line of a request that was refused with nothing written, but for what Python keeps of the factory's module."""
    lines = done.stderr.strip().splitlines()
    assert done.returncode == 2 and done.stdout == "" and len(lines) == 1, (done.stdout, done.stderr)
    assert lines[0].startswith("opweave: ") and "Traceback" not in lines[0]
    assert sorted({*os.listdir(folder)} - {"__pycache__"}) == before
    return lines[0]


def with_device(request_: str) -> list[str]:
    arguments = [request_] if " " in request_ and "{" in request_ else request_.split()
    return [*arguments, "device=cpu" if "device" not in request_ else "seed=0"]


@pytest.mark.parametrize(("request_", "says"), BAD_REQUESTS, ids=[r for r, _ in BAD_REQUESTS])
def test_a_bad_request_is_one_line(run_here: Run, folder: Path, request_: str, says: str) -> None:
    before = sorted(os.listdir(folder))
    assert says in refused(run_here(*with_device(request_)), folder, before)


@pytest.mark.parametrize(("request_", "says"), BAD_REQUESTS[::15], ids=[r for r, _ in BAD_REQUESTS[::15]])
def test_a_bad_request_is_one_line_of_a_process(run: Run, folder: Path, request_: str, says: str) -> None:
    before = sorted(os.listdir(folder))
    assert says in refused(run(*with_device(request_)), folder, before)


@pytest.mark.parametrize(("factory", "says"), BAD_FACTORIES, ids=[f for f, _ in BAD_FACTORIES])
def test_a_wrong_factory_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch, factory: str, says: str) -> None:
    """As the process answers that a sweep asks before it measures anything."""
    monkeypatch.syspath_prepend(folder)
    model = choose("model", "custom", factory=factory)
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "tiny", raising=False)  # another folder's
        answer = guarded(Worker(io.StringIO()).carry_out, Check("model", model, 1))
    assert isinstance(answer, Refused) and says in answer.reason and "\n" not in answer.reason


@pytest.mark.slow
def test_a_folder_of_ones_own_may_have_names_of_ours(run: Run, folder: Path) -> None:
    """Of every room: a project has models and results too. A factory within such a one is told what is in its place."""
    rooms = ("conf", "models", "results", "runners", "systems")
    for room in rooms[:-1]:
        (folder / room).mkdir()
        (folder / room / "__init__.py").write_text("def make(batch): pass")
    (folder / "systems.py").write_text("raise RuntimeError('ours was not meant')")
    arguments = "system=eager", "runner=correctness", "results=r", "device=cpu", "model=custom"
    done = run(*arguments, "model.factory=tiny:make")
    assert done.returncode == 0 and "relative error" in done.stdout, done.stdout + done.stderr
    (folder / "uses.py").write_text("from models.net import make")
    for factory in ("models.net:make", "models:make", "uses:make"):
        done = run(*arguments, f"model.factory={factory}")
        assert done.returncode == 2 and f"in the place of {folder / 'models'}: rename yours" in done.stderr, done.stderr


@pytest.mark.slow
def test_a_wrong_factory_after_a_right_one_ends_a_sweep_before_it_measures(run: Run, folder: Path) -> None:
    before = sorted(os.listdir(folder))
    done = run("-m", "model=custom", "model.factory=tiny:make,tiny:mak", "system=eager", "device=cpu")
    assert "did you mean make" in refused(done, folder, before)


@pytest.mark.slow
def test_a_wrong_option_of_a_system_is_one_line(run: Run, folder: Path) -> None:
    before = sorted(os.listdir(folder))
    done = run("-m", "model=squeezenet", "system=torch_compile", "system.mode=default,fastest", "device=cpu")
    assert "max-autotune" in refused(done, folder, before)
    assert "sequence" in refused(run("model=bert", "model.sequence=0", "system=eager"), folder, before)
    # Each value is right alone, and the first cell is too.
    done = run("-m", "model=bert", "model.heads=12,7", "system=eager", "device=cpu")
    assert "multiple of heads" in refused(done, folder, before)


def test_an_option_that_all_swept_systems_have_is_taken_for_each(run_here: Run, folder: Path) -> None:
    """Though the system of conf/config.yaml has it not. What is refused is then the batch, and not the option."""
    before = sorted(os.listdir(folder))
    options = ["capture=false", "schedule='a b, (c).json'", "schedule="]
    for system, option in [("sequential,ios", option) for option in options]:
        done = run_here("-m", "model=squeezenet", f"system={system}", f"system.{option}", "batch=0")
        assert "batch" in refused(done, folder, before)
    done = run_here("-m", "model=squeezenet", "system=eager,ios", "system.capture=false")
    assert "no key 'system.capture'" in refused(done, folder, before)


@pytest.fixture
def cells_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Cell]]:
    """What a request composes into; nothing of it runs."""

    def cells_of(*arguments: str) -> list[Cell]:
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", command(*arguments)[1:])
        for variable, value in environment(HYDRA_FULL_ERROR="1").items():
            monkeypatch.setenv(variable, value)
        return [cell for request in composed().requests for cell in request.cells]

    return cells_of


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["runner.trace=null"], [None]),
        (["runner.trace=absent.csv", "runner.trace=null"], [None]),
        (["runner.trace=null", "batch=1,2"], [None, None]),
    ],
)
def test_null_is_swept_over_as_any_value_is(
    arguments: list[str], expected: list[None], cells_of: Callable[..., list[Cell]]
) -> None:
    """Of an option that the swept runner has, and the one of conf/config.yaml has not."""
    made = cells_of("-m", "model=gpt", "system=orca", "runner=serving", "device=cpu", *arguments)
    assert [cell.runner.options["trace"] for cell in made] == expected


ORCA = [name for name in names() if name.startswith("orca/")]
ALIKE = re.compile(r"figure4\.[78][bc]")  # other models under the same systems


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * bool(ALIKE.search(n))) for n in ORCA])
def test_a_small_run_of_an_exhibit_of_orca_composes(name: str, cells_of: Callable[..., list[Cell]], tmp_path: Path) -> None:
    """Whatever its preset says that small changes."""
    small = Exhibit(Preset.read(name), {}, tmp_path, tmp_path, small=True)
    sweep = {key: value for key, value in small.preset.sweep.items() if key != "output"}
    assert cells_of("-m", *(f"{key}={value}" for key, value in sweep.items()))


def test_a_folder_without_permission_is_one_line(run_here: Run, folder: Path) -> None:
    # Not even root can make a file in /proc.
    for argument in ("results=/proc/opweave", "results=/proc"):
        assert "cannot be written" in refused(run_here(argument, "device=cpu"), folder, ["tiny.py"])
    assert "cannot be written" in refused(run_here("runner=schedule", "output=/proc/x.json"), folder, ["tiny.py"])


def test_a_cache_that_can_be_no_folder_is_one_line(run_here: Run, folder: Path) -> None:
    for place in ("tiny.py", "tiny.py/deeper"):
        for runner in ("cache", "latency"):
            assert "tiny.py is a file" in refused(run_here(f"runner={runner}", OPWEAVE_CACHE=place), folder, ["tiny.py"])


def test_the_traceback_is_there_for_who_asks(run: Run) -> None:
    done = run("batch=0", HYDRA_FULL_ERROR="1")
    assert done.returncode == 2 and "Traceback" in done.stderr and "BadRequest" in done.stderr


def test_a_program_that_breaks_has_a_status_of_its_own(run: Run, folder: Path) -> None:
    """1 would say that a cell failed."""
    (folder / "broken").mkdir()
    (folder / "broken" / "hydra.py").write_text("raise RuntimeError('it broke')")
    done = run("--version", PYTHONPATH=str(folder / "broken"))
    assert done.returncode == 3 and "Traceback" in done.stderr and done.stderr.endswith("RuntimeError: it broke\n")


def without_torch(arguments: list[str], folder: Path) -> "subprocess.CompletedProcess[str]":
    """A run whose own process imports neither PyTorch nor a model."""
    python, *rest = command(*arguments)
    done = subprocess.run([python, "-X", "importtime", *rest], cwd=folder, env=environment(), capture_output=True, text=True)
    lines = [line for line in done.stderr.splitlines() if "import time:" in line]
    packages = {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}
    assert "hydra" in packages and not {"torch", "torchvision", "transformers", "tiny"} & packages
    return done


def test_the_programs_own_process_never_imports_torch(folder: Path) -> None:
    """Nor where it runs a cell, as below."""
    for arguments in (["--help"], ["batch=0"], ["model=nasne"], ["experiment=reference/zoo", "batch=1,0"]):
        without_torch(arguments, folder)


def test_the_version_is_that_of_the_project(run: Run) -> None:
    done = run("--version")
    assert done.returncode == 0 and re.fullmatch(r"opweave \d+\.\d+\.\d+\n", done.stdout), done.stderr


def test_help_says_what_there_is(run: Run) -> None:
    done = run("--help")
    assert done.returncode == 0
    for word in (
        "nasnet",
        "torch_compile",
        "sm_efficiency",
        "model.factory=",
        "timeout",
        "HYDRA_FULL_ERROR",
        "reference/zoo",
    ):
        assert word in done.stdout


def test_a_shell_completes_what_there_is() -> None:
    programs = Path(sys.executable).parent
    assert completions("python run.py", "model=na", programs, ROOT) == ["model=nasnet", "model=nasnet_large"]
    assert "system.multi_stream=" in completions("python run.py", "system.", programs, ROOT)


def test_one_cell_from_request_to_record(folder: Path) -> None:
    cell = ["model=custom", "model.factory=tiny:make", "system=nimble", "batch=2", "results=r", "runner.samples=120"]
    done = without_torch(cell, folder)
    assert done.returncode == 0, done.stderr
    (record,) = records(folder / "r").values()
    (file,) = (folder / "r").glob("*.json")
    assert file.name == f"custom-nimble-b2-cpu-{record['id']}.json" and str(file) in done.stdout
    assert set(os.listdir(folder)) - {"__pycache__"} == {"r", "tiny.py"}  # Hydra leaves nothing of its own
    assert record["status"] == "ok" and record["reason"] is None
    assert not {"comparison", "learning_s", "pending"} & set(record)
    assert set(record["cell"]) == {"model", "system", "runner", "conditions"}
    assert record["cell"]["conditions"]["device"] == "cpu" and record["cell"]["model"]["changed"] == ["factory"]
    assert len(record["latency"]["host_ms"]) >= 120 and record["latency"]["device_ms"] is None
    statistics = record["latency"]["host"]
    assert statistics["ci95"][0] <= statistics["median"] <= statistics["ci95"][1]
    assert record["throughput"]["statistics"]["median"] > 0 and record["memory"]["peak_bytes"] >= 0
    assert record["sm_efficiency"]["value"] is None and "CPU" in record["sm_efficiency"]["reason"]
    (energy,) = {q["reason"] for q in record["measured"]["energy"]["quantities"]}
    assert "CPU" in energy
    assert record["correctness"]["is_correct"] and record["correctness"]["inputs"] >= 3
    assert record["limits"]["source"] == "host" and 0 < record["limits"]["critical_path_ms"] <= record["limits"]["busy_ms"]
    assert record["schedule"]["operators"] == record["limits"]["operators"] and record["preparation_s"] > 0
    for key in ("host", "cpu", "python", "libraries", "commit", "threads"):
        assert record["environment"][key]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+\+00:00", record["when"])
