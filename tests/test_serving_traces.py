"""Traces of requests: drawn ones, those of files, and what cannot be asked for."""

from __future__ import annotations

import gzip
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving_cells import OPTIONS

from results.cell import choose
from runners.checks import BadRequest
from runners.serving.options import ServingOptions, SimulationOptions
from runners.serving.workload import at_rate, drawn, read


def test_drawn_traces_have_the_rate_the_burstiness_and_the_lengths_that_were_asked_for() -> None:
    for burstiness in (0.25, 1.0, 4.0):
        trace = drawn(4000, 5.0, burstiness, (32, 512), (1, 128), seed=3)
        gaps = np.diff([client_request.due_s for client_request in trace])
        assert gaps.mean() == pytest.approx(1 / 5.0, rel=0.1)
        assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.1)  # of a gamma distribution
    prompts, new = [a.prompt_tokens for a in trace], [a.max_new_tokens for a in trace]
    assert (min(prompts), max(prompts), min(new), max(new)) == (32, 512, 1, 128)
    assert np.mean(prompts) == pytest.approx(272, rel=0.03) and np.mean(new) == pytest.approx(64.5, rel=0.03)


def test_one_length_is_a_span_of_its_own() -> None:
    assert {a.prompt_tokens for a in ServingOptions(**OPTIONS | {"prompt_tokens": 9}).trace_of(0)} == {9}
    runner = choose("runner", "serving", prompt_tokens=9, new_tokens="3")
    assert (runner.options["prompt_tokens"], runner.options["new_tokens"]) == (9, "3")


def test_traces_of_one_seed_differ_in_their_rate_alone() -> None:
    slow, fast, other = (drawn(50, rate, 1.0, (1, 9), (1, 9), seed) for rate, seed in ((1.0, 0), (4.0, 0), (1.0, 1)))
    assert [a.prompt_tokens for a in slow] == [a.prompt_tokens for a in fast] != [a.prompt_tokens for a in other]
    assert [a.due_s / 4 for a in slow] == pytest.approx([a.due_s for a in fast]) and slow[0].due_s == 0


@given(st.integers(2, 60), st.floats(0.1, 50.0), st.integers(0, 99))
def test_a_trace_at_a_rate_comes_at_it_and_keeps_its_bursts(count: int, rate: float, seed: int) -> None:
    trace = drawn(count, 1.0, 1.0, (1, 9), (1, 9), seed)
    scaled = at_rate(trace, rate)
    assert scaled[-1].due_s == pytest.approx((count - 1) / rate)
    assert [a.due_s / scaled[-1].due_s for a in scaled] == pytest.approx([a.due_s / trace[-1].due_s for a in trace])
    assert [(a.prompt_tokens, a.max_new_tokens) for a in scaled] == [(a.prompt_tokens, a.max_new_tokens) for a in trace]
    assert at_rate(trace[:1], rate) == trace[:1]


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"


BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,x\n45,GPT-4,1087,230,1317,x\n"  # noqa: E501


def test_files_of_azure_and_burstgpt_are_read(tmp_path: Path) -> None:
    for name, text, gap in (("a.csv", AZURE, 4.314579), ("b.csv", BURST, 40.0)):
        (tmp_path / name).write_text(text)
        first, second = read(tmp_path / name, 100)
        assert first.due_s == 0 and second.due_s == pytest.approx(gap, abs=1e-5) and read(tmp_path / name, 1) == (first,)
    assert read(tmp_path / "a.csv", 9)[1].prompt_tokens == 396 and read(tmp_path / "b.csv", 9)[1].max_new_tokens == 230
    fast = ServingOptions(**OPTIONS | {"trace": str(tmp_path / "b.csv"), "trace_speed": 2.5, "requests": 2}).trace_of(0)
    assert [arrival.due_s for arrival in fast] == [0.0, 16.0]
    with pytest.raises(BadRequest, match=r"^runner.requests=3: .*b.csv has 2$"):
        ServingOptions(**OPTIONS | {"trace": str(tmp_path / "b.csv"), "requests": 3})
    with gzip.open(tmp_path / "a.csv.gz", "wt") as file:
        file.write(AZURE)
    assert read(tmp_path / "a.csv.gz", 9) == read(tmp_path / "a.csv", 9)
    (tmp_path / "failed.csv").write_text(f"{BURST}46,GPT-4,9,0,9,x\n47,GPT-4,9,1,10,x\n")
    assert [arrival.max_new_tokens for arrival in read(tmp_path / "failed.csv", 3)] == [18, 230, 1]


@pytest.mark.parametrize("zone", ["", "+00:00", "-07:00", "Z"])
def test_times_of_a_trace_may_have_a_zone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zone: str) -> None:
    """The clocks of this shell skip an hour between both; those of the trace do not."""
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        times = ("2024-03-31 01:59:59.009930", "2024-03-31 03:00:00.5")
        rows = "".join(f"{time_}{zone},9,9\n" for time_ in times)
        (tmp_path / "zone.csv").write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}")
        assert read(tmp_path / "zone.csv", 9)[1].due_s == pytest.approx(3601.49007, abs=1e-5)
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read"),
        (f"{BURST}46,GPT-4,9,0,9,x\n\n44,GPT-4,9,1,10,x\n", "line 6: it comes before the request above it"),
        ("", "lacks columns"),
        ("TIMESTAMP,ContextTokens\n1,2\n", "lacks columns: it needs TIMESTAMP, ContextTokens, GeneratedTokens (Azure's)"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "holds no request"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n5,1,1\n4,1,1\n", "line 3: it comes before"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n5,-1,1\n", "line 2: it has no prompt token"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n5,1,0\n", "line 2"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnan,1,1\n", "line 2"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n5,x,1\n", "line 2: '5', 'x', '1' are no time and two numbers of tokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n5\n", "line 2: '5', '', '' are no time and two numbers of tokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,1\n", "line 2: 'noon', '1', '1' are no time"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_in_one_line(tmp_path: Path, text: str | None, words: str) -> None:
    if text is not None:
        (tmp_path / "x.csv").write_text(text)
    with pytest.raises(BadRequest) as caught:
        ServingOptions(**OPTIONS | {"trace": str(tmp_path / "x.csv")})
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("damaged", [lambda whole: whole[:-30], lambda whole: whole[:60] + b"\0" * 9 + whole[69:]])
def test_a_compressed_trace_that_is_damaged_is_refused_in_one_line(
    tmp_path: Path, damaged: Callable[[bytes], bytes]
) -> None:
    rows = "".join(f"{i},{i % 50 + 1},{i % 7 + 1}\n" for i in range(400))
    file = tmp_path / "cut.csv.gz"
    file.write_bytes(damaged(gzip.compress(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}".encode())))
    with pytest.raises(BadRequest, match=r"^runner.trace=.*cut.csv.gz cannot be read: [^\n]+$"):
        ServingOptions(**OPTIONS | {"trace": str(file), "requests": 400})


def test_a_trace_that_takes_more_than_a_year_is_refused(tmp_path: Path) -> None:
    (tmp_path / "b.csv").write_text(BURST)
    with pytest.raises(
        BadRequest, match=r"^runner.trace_speed=1e-12: the last of 2 requests comes after 1,268,391.* years$"
    ):
        ServingOptions(**OPTIONS | {"trace": str(tmp_path / "b.csv"), "trace_speed": 1e-12, "requests": 2})
    with pytest.raises(BadRequest, match=r"^runner.rates=1e-9: the last of 8 requests comes after 253.* years$"):
        SimulationOptions(**OPTIONS | {"rates": "1e-9 5"})
    with pytest.raises(BadRequest, match=r"^runner.rate=1e-300: the last of 8 requests comes after 2.54e\+293 years$"):
        ServingOptions(**OPTIONS | {"rate": 1e-300})


def test_more_requests_than_are_drawn_at_once_are_refused_before_one_is() -> None:
    """Whatever the key is that makes them so many."""
    assert ServingOptions(**OPTIONS | {"requests": 500_000, "repeats": 2, "rate": 1e9}).requests == 500_000
    with pytest.raises(BadRequest, match=r"^runner.requests=10000000 are more than 1000000 requests$"):
        ServingOptions(**OPTIONS | {"requests": 10_000_000, "rate": 1e9})
    with pytest.raises(BadRequest, match=r"^runner.requests=500000 and runner.repeats=3 are more than 1000000 requests$"):
        ServingOptions(**OPTIONS | {"requests": 500_000, "repeats": 3, "rate": 1e9})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[
            ("rate", 0.0),
            ("rate", 1e-12),
            ("rate", float("inf")),
            ("rate", -1.0),
            ("burstiness", 0.0),
            ("requests", 0),
            ("repeats", 0),
        ],
        *[("prompt_tokens", "0-4"), ("prompt_tokens", "9-4"), ("new_tokens", "x"), ("new_tokens", "1-2-3")],
        *[("trace_speed", 0.0), ("shared_tokens", -1), ("concurrency", -1), ("slo_ms", -0.5), ("trace", 3)],
    ],
)
def test_options_that_cannot_be_are_refused(key: str, value: object) -> None:
    with pytest.raises(BadRequest, match=f"runner.{key}="):
        ServingOptions(**OPTIONS | {key: value})
