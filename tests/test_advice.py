"""runner=advise: the verdict, its reason, the command that comes next, and how a request is answered."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import Run, gpu_environment, without_progress
from simulated import made_set
from test_request_fuzz import answer
from torch import nn

from results.advice import WORTH, Advice, Forecast
from results.cell import Cell, Conditions, choose
from results.document import part_from_json, part_to_json
from runners.cell.messages import Failed, Shown
from runners.request.request import Request, SweepOptions
from runners.showings import advise
from runners.showings.advise import known_sets
from tests.modules import Branches, captured

CELL = Cell(choose("model", "squeezenet"), choose("system", "nimble"), choose("runner", "advise"), Conditions(1, "cpu"))

pytestmark = pytest.mark.usefixtures("arithmetic_of_torch")


def made(gain: float, width: int = 4, critical_path_ms: float = 0.3, sm_area_ms: float = 0.2) -> Advice:
    """Of a scheduler that gains so much over one stream of 1 ms, of which kernels take 0.9 ms."""
    forecasts = Forecast("nimble", 1 / gain, 2), Forecast("ios", None, reason="too wide")
    figures = 9, 9, width, 1.0, None, 0.05, 0.9, critical_path_ms, sm_area_ms, 0.45, 0.0
    return Advice(CELL, "h200", "measured here", False, *figures, forecasts)


@pytest.mark.parametrize(
    ("advice", "pays", "words"),
    [
        (made(1.6), True, "yes: nimble is predicted to be 1.60 times as fast"),
        (made(1.08), True, "; that is within the simulator's error: measure it"),
        (made(1.02), False, "within the simulator's error"),
        (made(1.02, critical_path_ms=0.97), False, "the longest chain of operators is 108%"),
        (made(0.9), False, "edges between streams"),
        (made(1.0, critical_path_ms=0.88), False, "the longest chain of operators is 98%"),
        (made(1.0, sm_area_ms=0.85), False, "kernels hold 94% of the SMs"),
        (made(1.0, width=1), False, "each operator depends on the one before it"),
        (replace(made(1.6), estimated_ms=0.5), True, "; that rests on estimates: measure it"),
        (
            replace(made(1.08), estimated_ms=0.5),
            True,
            "; that is within the simulator's error and rests on estimates: measure it",
        ),
    ],
)
def test_the_verdict_and_its_reason(advice: Advice, pays: bool, words: str) -> None:
    assert advice.pays is pays and words in advice.verdict
    assert advice.launch_share == pytest.approx(0.1)
    assert any("ios: too wide" in line for line in advice.lines)
    assert ("within the simulator's error" in advice.verdict) is (
        advice.most > WORTH and abs(advice.best[0] - WORTH) <= 0.05
    )
    assert any("what fusion may save 50%" in line for line in advice.lines)


@pytest.mark.parametrize(
    ("nimble", "opara", "best", "words"),
    [  # the gain of each: predicted, and measured where that is known
        ((2.3, 1.4), (2.3, 1.5), (1.5, "opara", True), "yes: opara was measured to be 1.50 times as fast as one stream"),
        ((2.3, 1.4), (1.7, None), (1.7, "opara", False), "yes: opara is predicted to be 1.70 times as fast as one stream"),
        ((2.3, 0.9), (1.7, 0.8), (1.0, "cuda_graph", True), "no: no scheduler was measured to gain more than 5%"),
        ((2.3, 1.04), (1.7, 1.0), (1.04, "nimble", True), "no: no scheduler was measured to gain more than 5%"),
        ((2.3, 0.9), (0.9, None), (1.0, "cuda_graph", False), "rests on estimates: measure it"),
    ],
)
def test_a_measured_gain_counts_and_not_the_prediction(
    nimble: tuple[float, float | None],
    opara: tuple[float, float | None],
    best: tuple[float, str, bool],
    words: str,
) -> None:
    pairs = (("nimble", *nimble), ("opara", *opara))
    forecasts = tuple(Forecast(name, 1 / gain, 2, measured_gain=measured) for name, gain, measured in pairs)
    advice = replace(made(1.0), forecasts=forecasts, estimated_ms=0.9)
    assert advice.best == best and words in advice.verdict
    assert not best[2] or ("estimates" not in advice.verdict and "error" not in advice.verdict)


def test_no_is_measured_of_those_alone_that_were() -> None:
    """Nimble was measured below 5 %, and IOS is predicted near it."""
    forecasts = Forecast("nimble", 1 / 1.04, 2, measured_gain=1.048), Forecast("ios", 1 / 1.044, 2)
    advice = replace(made(1.0), forecasts=forecasts)
    assert advice.best == (1.048, "nimble", True)
    assert advice.verdict.startswith("no: no scheduler was measured or is predicted to gain more than 5%, since ")
    assert advice.verdict.endswith("; that is within the simulator's error: measure it") and ",nimble,ios," in advice.command
    far = replace(advice, forecasts=(forecasts[0], Forecast("ios", 1 / 0.9, 2)))
    assert "measure it" not in far.verdict
    unknown = replace(advice, forecasts=(forecasts[0], Forecast("ios", None, reason="too wide")), estimated_ms=0.9)
    assert unknown.verdict.endswith("; that leaves out ios: measure it") and "or is predicted" not in unknown.verdict


def test_no_schedule_gains_more_than_either_limit_lets_it() -> None:
    """One stream takes 1 ms."""
    assert made(1.0, critical_path_ms=0.35, sm_area_ms=0.2).most == pytest.approx(2.5)  # 0.05 of launch and end
    assert made(1.0, critical_path_ms=0.35, sm_area_ms=0.45).most == pytest.approx(2.0)
    assert replace(made(1.0), critical_path_ms=0.0, sm_area_ms=0.0, launch_ms=0.0).most == 1.0
    assert made(1.0, width=1).most == 1.0


def test_a_scheduler_without_a_forecast_is_a_doubt_and_is_measured() -> None:
    """IOS has none, and only of a chain is that no matter."""
    none_gains = made(1.0)
    assert none_gains.verdict.endswith("; that leaves out ios: measure it") and ",nimble,ios," in none_gains.command
    assert ",nimble,ios," in made(1.6).command and "leaves out" not in made(1.6).verdict
    chain = replace(made(1.0, width=1), estimated_ms=0.9)
    assert "measure it" not in chain.verdict and "nimble," not in chain.command
    bounded = made(1.0, sm_area_ms=0.92)  # at most 3 % faster
    assert "leaves out" not in bounded.verdict and "nimble," not in bounded.command


@pytest.mark.parametrize(("streams", "is_said"), [(200, False), (250, True)])
def test_a_launch_of_many_streams_may_take_longer_than_their_kernels(streams: int, is_said: bool) -> None:
    """Of 0.625 ms: a stream takes the host up to 3 us."""
    advice = replace(made(1.6), forecasts=(Forecast("nimble", 0.625, streams),))
    doubt = f"; that leaves out the host, which may take longer to launch {streams} streams: measure it"
    assert advice.verdict.endswith(doubt) is is_said
    measured = replace(advice, forecasts=(Forecast("nimble", 0.625, streams, measured_gain=1.5),))
    assert "host" not in measured.verdict


def test_merged_operators_are_told_where_kernels_are_others() -> None:
    advice = replace(made(1.6), forecasts=(Forecast("ios", 0.5, 3, num_merged=2),))
    assert "  ios 2.00x: 0.500 ms on 3 streams, with 2 merged operators" in advice.lines


@pytest.mark.parametrize("gain", [1.0, 1.02, 1.5])  # the second is too near to WORTH to leave the schedulers out
def test_the_command_that_comes_next_is_right(gain: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For every condition and option that was asked for."""
    monkeypatch.chdir(tmp_path)
    changed = choose("model", "gpt", layers=3)
    conditions = Conditions(8, "cuda", "fp16", "channels_last", 7, "timed")
    advice = replace(made(gain), cell=replace(CELL, model=changed, conditions=conditions))
    command = replace(advice, forecasts=advice.forecasts[:1]).command
    assert all(
        part in command
        for part in (
            "model=gpt model.layers=3",
            "batch=8",
            "precision=fp16",
            "layout=channels_last",
            "algorithms=timed",
            "seed=7",
        )
    )
    arguments = tuple(command.split()[2:])
    assert answer(arguments, monkeypatch) is None, command
    assert ("opara" in command or "ios" in command or "nimble," in command) is (gain > 1)
    assert answer((*arguments, "model.layer=3"), monkeypatch) is not None


def test_what_another_arithmetic_measured_is_not_taken() -> None:
    """All committed sets are of TF32 in convolutions."""
    chain = captured(nn.ReLU(), torch.zeros(8))
    sets = known_sets("squeezenet", 1, chain)  # its own know of operators before others do, and the last one counts
    assert sets[-1].model == "squeezenet" and sets[-1].batch == 1 and sets[0].model != "squeezenet"
    allowed = torch.backends.cudnn.allow_tf32
    try:
        torch.backends.cudnn.allow_tf32 = False
        assert known_sets("squeezenet", 1, chain) == []
    finally:
        torch.backends.cudnn.allow_tf32 = allowed


@pytest.mark.slow
def test_the_runner_advises_without_a_gpu(run: Run, folder: Path) -> None:
    done = run("runner=advise", "model=squeezenet", "device=cpu", "output=a.json")
    assert done.returncode == 0, done.stderr
    assert "kernels measured on NVIDIA H200\n" in done.stdout and "estimated" not in done.stdout
    (document,) = json.loads((folder / "a.json").read_text())
    advice = part_from_json(document, Advice)
    assert "\n".join(advice.lines) == done.stdout.strip() and advice.measured_ms is not None
    nimble = advice.forecasts[0]
    assert nimble.system == "nimble" and nimble.measured_gain == pytest.approx(advice.gain(nimble), rel=0.1)


@pytest.mark.parametrize(
    ("arguments", "source"),
    [
        pytest.param(["runner.gpu=v100"], "on v100: a guess: kernels measured on NVIDIA H200\n", marks=pytest.mark.slow),
        (["runner.gpu=v100", "precision=fp32"], "on v100: kernels measured nowhere, 100% of their time estimated"),
        (["algorithms=timed"], "on h200: kernels measured on NVIDIA H200, by other algorithms\n"),
    ],
)
def test_a_source_that_is_not_the_cell_itself_is_told(run_here: Run, arguments: list[str], source: str) -> None:
    """What was measured of the same network on another GPU or by other algorithms is not set beside what is predicted."""
    done = run_here("runner=advise", "model=squeezenet", "device=cpu", *arguments)
    assert done.returncode == 0 and source in done.stdout and "; measured" not in done.stdout, done.stdout
    assert ", measured " not in done.stdout


@pytest.mark.slow
def test_a_custom_model_is_estimated(run: Run) -> None:
    done = run("runner=advise", "model=custom", "model.factory=tiny:make", "device=cpu", "precision=bf16", "batch=4")
    assert done.returncode == 0, done.stderr
    assert "100% of their time estimated" in done.stdout
    assert re.search(
        r"next, on a GPU: python run.py -m model=custom model.factory=tiny:make batch=4 precision=bf16 system=", done.stdout
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["runner.gpu=h2000"], "did you mean h200"), (["runner.profile=nowhere.json"], "nowhere.json")],
)
def test_a_wrong_request_is_one_line(run_here: Run, arguments: list[str], words: str) -> None:
    done = run_here("runner=advise", "model=squeezenet", "device=cpu", *arguments)
    assert done.returncode == 2 and words in done.stderr and len(without_progress(done.stderr)) == 1, done.stderr


def test_a_profile_of_no_program_is_one_line(run_here: Run, tmp_path: Path) -> None:
    program = captured(Branches(), torch.randn(1, 3, 8, 8))
    document = made_set(program, [50.0] * len(program.graph)).to_json() | {"programs": {}, "schedules": []}
    (tmp_path / "empty.json").write_text(json.dumps(document))
    done = run_here("runner=advise", "model=squeezenet", "device=cpu", f"runner.profile={tmp_path / 'empty.json'}")
    (line,) = without_progress(done.stderr)
    assert done.returncode == 2 and line.endswith("empty.json is no file of runner=profile: it holds no program")


@pytest.mark.parametrize(("status", "code"), [("unsupported", 0), ("failed", 1), ("timeout", 1)])
def test_a_model_without_advice_is_a_line_and_the_next_has_its_own(
    status: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """What cannot be is no failure; whatever fails else is, wherever it stands among the cells."""
    cannot = Failed("unsupported", "it cannot be")
    answers = {1: Failed(status, "no such thing"), 2: cannot, 3: Shown(part_to_json(made(1.5)))}
    monkeypatch.setattr(advise, "ask", lambda cell, options: answers[cell.batch])
    output = tmp_path / "a.json"
    cells = tuple(replace(CELL, conditions=Conditions(batch, "cpu")) for batch in answers)
    for order in (cells, cells[::-1]):
        request = Request(order, SweepOptions(tmp_path, False, 1.0, None, 0, 1.0, None, output))
        assert advise.Advise(CELL.runner).run(request) == code
        shown = capsys.readouterr()
        assert f"opweave: squeezenet b1: {status}: no such thing" in shown.err.splitlines() and shown.err.count("\n") == 2
        assert "1.50 times as fast" in shown.out
        assert len(json.loads(output.read_text())) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_advice_on_a_gpu_is_of_its_own_kernels(run: Run) -> None:
    done = run("runner=advise", "model=squeezenet", "device=cuda", **gpu_environment())
    assert done.returncode == 0, done.stderr
    simulated, measured = re.search(r"one stream (\S+) ms simulated, measured (\S+);", done.stdout).groups()  # type: ignore[union-attr]
    assert "kernels measured here\n" in done.stdout and float(simulated) == pytest.approx(float(measured), rel=0.15)
