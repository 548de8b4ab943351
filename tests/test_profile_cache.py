"""The cache of what was measured of operators."""

import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from modules import mixed
from test_profiling import CPU, HOPPER, PROFILE, whole

from systems.opara.demand import RESOURCES, demand
from systems.profiling import intensity, profiler
from systems.profiling.measurements import Measurements
from systems.profiling.profile import Profile
from systems.profiling.profiler import from_entry, profile, to_entry
from systems.scheduling.graph.capture import capture

pytestmark = pytest.mark.usefixtures("cache_folder")


def test_a_profile_is_measured_once_for_each_operator(monkeypatch: pytest.MonkeyPatch, cache_folder: Path) -> None:
    program = capture(*mixed())
    assert profile(program, measure=False) is None
    first = profile(program)
    assert first is not None and first.capacity is None and all(o.milliseconds > 0 for o in first.operators)
    assert first.signatures == tuple(map(program.signature, range(len(program.graph)))) and first.is_fresh
    for v, operator in enumerate(first.operators):
        assert operator.bytes_read + operator.bytes_written == intensity.work(program, v)[1]
    assert Profile.from_json(json.loads(json.dumps(first.to_json()))) == first
    monkeypatch.setattr(profiler, "host_times", lambda *_: pytest.fail("measured again"))
    assert profile(program) == profile(program, measure=False) == first
    (file,) = cache_folder.glob("*.json")
    assert json.loads(file.read_text())["of"]["torch"] == torch.__version__
    monkeypatch.setattr(torch, "__version__", "0.1")
    assert profile(program, measure=False) is None


def test_kernels_come_back_from_the_cache_as_they_were() -> None:
    Measurements("opara", CPU).add({"x": to_entry(PROFILE[0])})
    assert from_entry(Measurements("opara", CPU)["x"]) == PROFILE[0]


def test_an_entry_without_shapes_gives_the_same_demand_and_occupancy() -> None:
    """An entry with the numbers of blocks and threads alone, as a cache may hold it."""
    entry = to_entry(PROFILE[0])
    del entry["launches"]
    flat = from_entry(json.loads(json.dumps(entry)))
    assert [(k.grid, k.block) for k in flat.kernels] == [((8, 1, 1), (128, 1, 1)), ((8, 1, 1), (1024, 1, 1))]
    for resource in RESOURCES:
        assert demand(whole([flat], HOPPER), resource) == demand(whole(PROFILE[:1], HOPPER), resource)
    for one, other in zip(flat.kernels, PROFILE[0].kernels, strict=True):
        assert HOPPER.theoretical_occupancy(one) == HOPPER.theoretical_occupancy(other)


@pytest.mark.parametrize("entry", [3, {}, {"milliseconds": 1.0, "kernels": [{}]}, {"milliseconds": "1", "kernels": []}])
def test_an_entry_that_cannot_be_read_is_measured_again(entry: Any) -> None:
    program = capture(*mixed())
    assert profile(program) is not None
    Measurements("opara", CPU).add({f"operator {program.signature(0)}": entry})
    assert profile(program, measure=False) is None
    again = profile(program)
    assert again is not None and again.is_fresh and profile(program, measure=False) == again


@pytest.mark.parametrize("content", ["", "{", "[]", '{"of": 1}', '{"of": {}, "measured": {"x": 2}}'])
def test_a_cache_that_cannot_be_read_is_made_anew(content: str) -> None:
    cache = Measurements("opara", CPU)
    cache.add({"x": 1})
    cache.file.write_text(content)
    assert "x" not in Measurements("opara", CPU)
    Measurements("opara", CPU).add({"y": 3})
    assert "y" in Measurements("opara", CPU) and {f.suffix for f in cache.file.parent.iterdir()} == {".json", ".lock"}


def test_two_processes_keep_what_each_has_measured() -> None:
    first, second = Measurements("opara", CPU), Measurements("opara", CPU)
    first.add({"a": 1})
    second.add({"b": 2})
    assert Measurements("opara", CPU).measured == {"a": 1, "b": 2}


def test_a_process_does_not_write_back_what_it_has_read() -> None:
    """As where each GPU has a search of its own, which keeps its state under one name after every trial."""
    Measurements("weave", CPU).add({"a": 1})
    searching, other = Measurements("weave", CPU), Measurements("weave", CPU)
    searching.add({"a": 2})
    other.add({"b": 1})
    assert Measurements("weave", CPU).measured == {"a": 2, "b": 1}
    assert other["a"] == 2


def test_what_could_not_be_written_is_written_later(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Measurements("weave", CPU)
    cache.add({"a": 1})
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", Mock(side_effect=OSError(28, "No space left on device")))
        with pytest.warns(UserWarning, match="cannot be written"):
            cache.add({"a": 2})
    cache.add({"b": 1})
    assert Measurements("weave", CPU).measured == cache.measured == {"a": 2, "b": 1}


def test_a_cache_that_cannot_be_written_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("OPWEAVE_CACHE", str(tmp_path / "file"))
    cache = Measurements("opara", CPU)
    with pytest.warns(UserWarning, match="cannot be written"):
        cache.add({"a": 1})
    assert cache["a"] == 1
