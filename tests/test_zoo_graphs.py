"""What schedulers make of networks of the zoo, where the papers have figures of it; each network is captured once."""

from collections.abc import Callable
from functools import cache

import pytest

import models
import systems
from systems.base import System
from systems.ios.blocks import find_blocks, unit_graph
from systems.ios.units import find_units
from systems.profiling import intensity
from systems.scheduling import scheduler
from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.program import Program
from systems.scheduling.plans.schedule import Schedule
from systems.scheduling.plans.verify import verify

Scheduled = Callable[[System, str], Schedule]


@cache
def loaded(model: str) -> models.Model:
    return models.load(model, 1, device="meta")


@cache
def captured(model: str) -> Program:
    return capture(loaded(model).module, loaded(model).inputs)


MODELS = ["googlenet", pytest.param("inception_v3", marks=pytest.mark.slow)]


@pytest.fixture
def scheduled(monkeypatch: pytest.MonkeyPatch) -> Scheduled:
    """The schedule that a system makes of a model, where it finds the model captured."""

    def scheduled(system: System, model: str) -> Schedule:
        monkeypatch.setattr(scheduler, "capture", lambda *_: captured(model))
        schedule = system.schedule(loaded(model).module, loaded(model).inputs)
        assert schedule is not None
        return schedule

    return scheduled


@pytest.mark.parametrize(
    ("model", "units", "blocks"),
    [
        ("squeezenet", 39, 8),
        pytest.param("inception_v3", 121, 11, marks=pytest.mark.slow),
        ("googlenet", 82, 9),
        pytest.param("randwire", 111, 3, marks=pytest.mark.slow),
    ],
)
def test_units_and_blocks_of_the_zoo(model: str, units: int, blocks: int) -> None:
    """blocks: those of several units. The paper's Table 2 counts 11 blocks and 119 operators for Inception-v3, which are
    these without the last view and linear layer; 3 blocks and 120 operators for RandWire. Its SqueezeNet has bypasses,
    which torchvision's lacks.
    """
    program = captured(model)
    model_units = find_units(program)
    assert sorted(v for unit in model_units for v in unit) == list(range(len(program.graph)))
    graph = unit_graph(program.graph, model_units)
    assert len(model_units) == units < 0.75 * len(program.graph)
    parts = find_blocks(graph, len(model_units)).parts
    assert sum(len(part) > 1 for part in parts) == blocks
    for kind in ("operator", "conv_relu", "relu_sepconv"):
        unit_graph(program.graph, find_units(program, kind))


@pytest.mark.parametrize("model", MODELS)
def test_the_streams_of_nimble(scheduled: Scheduled, model: str) -> None:
    """Streams and waits of Algorithm 1 on torch.export's graphs; Inception-v3's width is the paper's (Table 1)."""
    schedule = scheduled(systems.load("nimble"), model)
    verify(schedule.graph, schedule)
    expected = {"googlenet": (28, 54, 4), "inception_v3": (36, 70, 6)}[model]
    assert (schedule.stream_count, len(schedule.waits), schedule.graph.width) == expected


@pytest.mark.parametrize(
    ("model", "streams", "num_waits"),
    [
        ("googlenet", 4, 54),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in (("inception_v3", 6, 70), ("bert", 3, 51), ("t5", 22, 102))),
    ],
)
def test_the_streams_of_the_released_code(scheduled: Scheduled, model: str, streams: int, num_waits: int) -> None:
    """GoogLeNet's are the 4 that Opara's Section 5.2 counts of Nimble."""
    schedule = scheduled(systems.load("nimble_released"), model)
    assert (schedule.stream_count, len(schedule.waits)) == (streams, num_waits)


@pytest.mark.parametrize("model", MODELS)
def test_the_streams_of_opara(scheduled: Scheduled, model: str) -> None:
    """GoogLeNet gets the 28 streams that the paper reports (Section 5.2)."""
    schedule = scheduled(systems.load("opara", classify="table"), model)
    verify(schedule.graph, schedule)
    assert (schedule.stream_count, len(schedule.waits)) == {"googlenet": (28, 54), "inception_v3": (36, 70)}[model]


def test_operations_are_those_of_the_published_count() -> None:
    """GoogLeNet's 1.5 G multiply-accumulates."""
    program = captured("googlenet")
    matrix = [v for v, o in enumerate(program.graph.operators) if o.name in ("conv2d", "linear")]
    assert sum(intensity.work(program, v)[0] for v in matrix) / 2 == pytest.approx(1.498e9, rel=0.001)
