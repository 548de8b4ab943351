"""The files of conf/gpu."""

from dataclasses import fields

import pytest

import conf
from systems.base import BadOption
from systems.profiling.profile import Kernel
from systems.scheduling.simulate.gpu import Gpu, find, load

PAPERS = ("h100", "h200", "v100", "a100", "rtx_2080_super", "rtx_2080_ti", "k80", "titan_rtx", "titan_xp")
LANES = {  # fp32 lanes of an SM by architecture, from the CUDA C++ Programming Guide's table of arithmetic throughput
    **dict.fromkeys(("h100", "h200", "titan_xp"), 128),
    **dict.fromkeys(("v100", "a100", "rtx_2080_super", "rtx_2080_ti", "titan_rtx"), 64),
    "k80": 192,
}


def test_every_gpu_of_the_papers_has_a_file() -> None:
    assert set(PAPERS) <= set(conf.choices("gpu"))


@pytest.mark.parametrize("name", conf.choices("gpu"))
def test_a_file_holds_what_a_gpu_has(name: str) -> None:
    gpu = load(name)
    assert gpu.name == name and find(gpu.device) == gpu
    assert set(conf.options("gpu", name)) == {field.name for field in fields(Gpu)}


@pytest.mark.parametrize("name", PAPERS)
def test_peak_arithmetic_is_that_of_the_lanes(name: str) -> None:
    """Two values of a data sheet that were read apart agree: lanes times clock, and the peak."""
    gpu = load(name)
    peak = 2 * gpu.multiprocessors * LANES[name] * gpu.clock_mhz * 1e6 / 1e12
    assert peak == pytest.approx(gpu.fp32_tflops, rel=0.02)


def test_the_capacity_is_an_sms() -> None:
    """64 warps on an SM of Hopper: 8 blocks of 256 threads, if neither registers nor shared memory forbid it."""
    kernel = Kernel("k", 1.0, (1000, 1, 1), (256, 1, 1), registers=32, shared_memory=0)
    assert load("h200").capacity.resident_blocks(kernel) == 8
    assert load("rtx_2080_ti").capacity.resident_blocks(kernel) == 4


def test_a_value_can_be_another() -> None:
    assert load("h200", multiprocessors=66).capacity.num_multiprocessors == 66


@pytest.mark.parametrize(
    ("name", "changed", "words"),
    [
        ("h20", {}, "did you mean h200"),
        ("h200", {"multiprocessor": 3}, "did you mean multiprocessors"),
        ("h200", {"multiprocessors": "many"}, "not an integer"),
        ("h200", {"multiprocessors": 0}, "at least 1"),
        ("h200", {"bandwidth_gb_s": float("nan")}, "it is a number"),
        ("h200", {"bandwidth_gb_s": 1e-308}, "at least 1e-09"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(name: str, changed: dict[str, conf.Value], words: str) -> None:
    with pytest.raises(BadOption, match=words) as caught:
        load(name, **changed)
    assert "\n" not in str(caught.value)


def test_nobody_finds_a_gpu_without_a_file() -> None:
    assert find("NVIDIA H300") is None
