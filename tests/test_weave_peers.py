"""weave_or_peers: who executes the model, and that the record says so."""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Run
from modules import Branches
from torch import Tensor, nn
from weave_space import branches

import systems
from systems.base import BadOption, PreparedModule, System, Unsupported
from systems.notice import Notice
from systems.scheduling.execution.scheduled import Scheduled
from systems.scheduling.scheduler import captured
from systems.weave import peers

pytestmark = pytest.mark.usefixtures("cache_folder")


class Peer(System):
    """Eager with a name of its own; its answer may be another one."""

    name = "peer"

    def __init__(self, factor: float = 1.0, reason: str = ""):
        self.factor, self.reason = factor, reason

    def prepare(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> PreparedModule:
        if self.reason:
            raise Unsupported(self.reason)
        return PreparedModule(lambda x: module(x) * self.factor)


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, list[float]]]:
    """Milliseconds of a call of weave and of a peer, round after round; the last goes on."""
    by_name: dict[str, list[float]] = {"weave": [1.0], "peer": [1.0]}

    def milliseconds(prepared: object, *_: object) -> float:
        own = by_name["weave" if isinstance(prepared, Scheduled) else "peer"]
        return own.pop(0) if len(own) > 1 else own[0]

    monkeypatch.setattr(peers, "milliseconds", milliseconds)
    yield by_name


def prepared(monkeypatch: pytest.MonkeyPatch, messages: list[str] | None = None, **options: Any) -> Any:
    monkeypatch.setattr(peers, "load", lambda name: Peer(**options))
    torch.manual_seed(0)
    module, x = Branches().eval(), torch.randn(2, 3, 16, 16)
    system = systems.load("weave_or_peers", peers="eager", budget_s=0.0)
    system.report = (messages if messages is not None else []).append
    made = system.prepare(module, (x,))
    with torch.no_grad():
        torch.testing.assert_close(made(x), module(x), rtol=1e-4, atol=1e-5)
    return made


def test_a_faster_peer_is_handed_the_model(monkeypatch: pytest.MonkeyPatch, times: dict[str, list[float]]) -> None:
    times["peer"] = [0.9]
    with pytest.warns(Notice, match=r"handed over whole to eager: 0.900 ms a call, weave 1.000 ms"):
        made = prepared(monkeypatch)
    assert not isinstance(made, Scheduled) and made.compilation.to_json() == {"handed_over": "eager"}
    monkeypatch.setattr(peers.WeaveOrPeers, "_compared", lambda *_: pytest.fail("it was compared before"))
    with pytest.warns(Notice, match="handed over"):
        prepared(monkeypatch)


@pytest.mark.parametrize("rounds", [[0.999], [1.5], [0.9] * 8 + [1.1]])
def test_what_is_no_faster_twice_is_not(
    monkeypatch: pytest.MonkeyPatch, times: dict[str, list[float]], rounds: list[float]
) -> None:
    times["peer"] = rounds
    made = prepared(monkeypatch)
    assert isinstance(made, Scheduled) and made.compilation is None and made.schedule.system == "weave"
    made.close()


@pytest.mark.parametrize(("options", "says"), [({"factor": 1.01}, "eager is left out: its error"), ({"reason": "no"}, "no")])
def test_a_peer_that_is_wrong_or_does_not_run_is_left_out(
    monkeypatch: pytest.MonkeyPatch, times: dict[str, list[float]], options: dict[str, Any], says: str
) -> None:
    times["peer"] = [0.1]
    messages: list[str] = []
    made = prepared(monkeypatch, messages, **options)
    assert isinstance(made, Scheduled) and any(says in message for message in messages)
    made.close()


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("backend failed: OutOfMemoryError: CUDA out of memory"), True),
        (RuntimeError("no such operator"), False),
    ],
)
def test_a_peer_that_only_lacked_memory_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, times: dict[str, list[float]], error: Exception, passes: bool
) -> None:
    times["peer"] = [0.5]

    def fail(peer: Peer, module: nn.Module, inputs: tuple[Tensor, ...]) -> PreparedModule:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Peer, "prepare", fail)
        made = prepared(monkeypatch)
        assert isinstance(made, Scheduled)
        made.close()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Notice)
        made = prepared(monkeypatch)
    assert isinstance(made, Scheduled) is not passes
    made.close()


def test_whoever_is_fastest_of_several_executes(monkeypatch: pytest.MonkeyPatch) -> None:
    """And by another budget weave may be another one, so that all are compared again."""
    compared: list[float] = []

    def comparisons(system: peers.WeaveOrPeers, *_: object) -> dict[str, peers.Comparison]:
        compared.append(system.budget_s)
        return {"eager": peers.Comparison(1.0, 0.9), "cuda_graph": peers.Comparison(2.0, 1.0)}

    monkeypatch.setattr(peers.WeaveOrPeers, "_compared", comparisons)
    module, inputs = Branches().eval(), (torch.randn(2, 3, 16, 16),)
    program = captured(module, inputs)
    for budget_s in (0.0, 0.0, 1.0):
        system = systems.load("weave_or_peers", peers="eager+cuda_graph", budget_s=budget_s)
        assert system._winner(program, module, inputs) == ("cuda_graph", peers.Comparison(2.0, 1.0))
    assert compared == [0.0, 1.0]


def test_a_peer_is_beside_weave_by_the_round_with_the_median_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first round warms up, and the last one counts."""
    ratios = [0.1, 1.5, 0.9, 1.1, 0.8, 1.2, 0.7, 1.3]
    assert len(ratios) == peers.ROUNDS + 1
    times = [ms for i, ratio in enumerate(ratios) for ms in (1.0 + i, (1.0 + i) * ratio)]
    monkeypatch.setattr(peers, "milliseconds", lambda prepared, *_: times.pop(0))
    comparison = peers._in_turn(None, None, branches())  # type: ignore[arg-type]
    assert (comparison.own_ms, comparison.ratio) == pytest.approx((4.0, 1.1))


@pytest.mark.parametrize(("excess", "is_handed_over"), [(0.9, True), (1.5, False)])
def test_a_peer_is_as_near_to_fp64_as_a_cell_has_to_be(
    monkeypatch: pytest.MonkeyPatch, times: dict[str, list[float]], excess: float, is_handed_over: bool
) -> None:
    times["peer"] = [0.1]
    monkeypatch.setattr(peers.Reference, "excess", lambda reference, outputs: excess)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Notice)
        made = prepared(monkeypatch)
    assert isinstance(made, Scheduled) is not is_handed_over
    made.close()


def test_a_peer_that_does_not_support_the_device_is_not_prepared(
    monkeypatch: pytest.MonkeyPatch, times: dict[str, list[float]]
) -> None:
    times["peer"] = [0.1]
    monkeypatch.setattr(Peer, "unsupported", lambda peer, device: f"it needs another device than {device}")
    messages: list[str] = []
    made = prepared(monkeypatch, messages)
    assert isinstance(made, Scheduled) and "eager is left out: it needs another device than cpu" in messages
    made.close()


@pytest.mark.parametrize("named", ["torchcompile", "weave", "eager+weave_or_peers"])
def test_a_name_that_is_no_peer_is_refused(named: str) -> None:
    with pytest.raises(BadOption, match=r"system\.peers"):
        systems.load("weave_or_peers", peers=named)


@pytest.mark.slow
def test_a_record_says_who_executes(run: Run, folder: Path) -> None:
    done = run(
        *("model=custom", "model.factory=tiny:make", "device=cpu", "runner=latency", "runner.samples=3", "rounds=0"),
        *("results=r", "system=weave_or_peers", "system.budget_s=0", "system.peers=eager+cuda_graph"),
    )
    assert done.returncode == 0, done.stderr
    (record,) = (json.loads(file.read_text()) for file in (folder / "r").glob("**/*.json"))
    executed_by = (record.get("compilation") or {}).get("handed_over")
    has_schedule = record.get("schedule") is not None
    assert executed_by in (None, "eager") and has_schedule is (executed_by is None)
    assert ("handed over whole to eager" in done.stdout) is (executed_by == "eager")


class Counts(nn.Module):
    """Keeps a count of its calls and a mean over them."""

    n: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return torch.relu(x - self.mean) * self.n


@pytest.mark.parametrize("peer", ["eager", "torchscript"])
def test_preparing_beside_peers_leaves_buffers_as_they_were(peer: str) -> None:
    module, x = Counts().eval(), torch.randn(8, 4)
    systems.load("weave_or_peers", peers=peer, budget_s=0.0).prepare(module, (x,)).close()
    assert module.n.item() == 0 and not module.mean.any()
