"""Traces: which requests come, and when. This file never imports torch."""

from __future__ import annotations

import csv
import gzip
import math
import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from reprlib import repr as shown

from runners.checks import BadRequest

# The columns of public traces: arrival, prompt tokens, generated tokens.
COLUMNS = {
    "Azure's": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "BurstGPT's": ("Timestamp", "Request tokens", "Response tokens"),
}
WITH_FAILURES = "BurstGPT's"  # requests that failed have no response token, and are left out


@dataclass(frozen=True)
class Arrival:
    """A request of a trace. due_s: seconds since the trace begins."""

    due_s: float
    prompt_tokens: int
    max_new_tokens: int

    @property
    def max_tokens(self) -> int:
        return self.prompt_tokens + self.max_new_tokens


def span_of(key: str, text: str | int) -> tuple[int, int]:
    """Both ends of "32-512", or of 32. Raises BadRequest."""
    parts = str(text).split("-")
    if len(parts) > 2 or not all(part.isdecimal() for part in parts):
        raise BadRequest(f"{key}={text} is not a number of tokens nor two of them, as 32-512")
    low, high = int(parts[0]), int(parts[-1])
    if not 1 <= low <= high:
        raise BadRequest(f"{key}={text} does not ascend from 1 at least")
    return low, high


def drawn(
    count: int, rate: float, burstiness: float, prompt_tokens: tuple[int, int], new_tokens: tuple[int, int], seed: int
) -> tuple[Arrival, ...]:
    """Uniform lengths, and gaps between arrivals from a gamma distribution.

    Args:
        count: requests.
        rate: arrivals a second.
        burstiness: the gamma's shape; 1 is a Poisson process, less comes in bursts.
        prompt_tokens, new_tokens: ends of the uniform distributions, inclusive.
        seed: of all draws. Rates apart, traces of one seed are the same.
    """
    lengths, gaps = random.Random(f"{seed}/lengths"), random.Random(f"{seed}/gaps")
    requests, due_s = [], 0.0
    for _ in range(count):
        requests.append(Arrival(due_s, lengths.randint(*prompt_tokens), lengths.randint(*new_tokens)))
        due_s += gaps.gammavariate(burstiness, 1 / burstiness) / rate
    return tuple(requests)


def at_rate(trace: Sequence[Arrival], rate: float) -> tuple[Arrival, ...]:
    """The same requests at exactly `rate` a second: as drawn, a hundred often come a tenth faster or slower."""
    last_s = trace[-1].due_s
    scale = (len(trace) - 1) / rate / last_s if last_s else 1.0
    return tuple(replace(arrival, due_s=arrival.due_s * scale) for arrival in trace)


def read(file: Path, count: int) -> tuple[Arrival, ...]:
    """The first requests of a trace file with the columns of COLUMNS. Raises BadRequest for what is none."""
    try:
        with (gzip.open if file.suffix == ".gz" else open)(file, "rt", newline="", encoding="utf-8-sig") as lines:
            reader = csv.DictReader(lines)
            names = {name.strip(): name for name in reader.fieldnames or ()}
            whose = next((whose for whose, columns in COLUMNS.items() if set(columns) <= set(names)), None)
            if whose is None:
                known = "; or ".join(f"{', '.join(columns)} ({whose})" for whose, columns in COLUMNS.items())
                raise BadRequest(f"runner.trace={file} lacks columns: it needs {known}")
            rows: list[Arrival] = []
            for row in reader:
                if len(rows) == count:
                    break
                cells = [row[names[column]] for column in COLUMNS[whose]]
                if whose == WITH_FAILURES and str(cells[-1]).strip() == "0":
                    continue
                arrival = _arrival_of(file, reader.line_num, cells)
                if rows and arrival.due_s < rows[-1].due_s:
                    raise BadRequest(f"runner.trace={file} line {reader.line_num}: it comes before the request above it")
                rows.append(arrival)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:  # also of a compressed file that is cut
        raise BadRequest(f"runner.trace={file} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not rows:
        raise BadRequest(f"runner.trace={file} holds no request")
    first_s = rows[0].due_s
    return tuple(Arrival(row.due_s - first_s, row.prompt_tokens, row.max_new_tokens) for row in rows)


def _arrival_of(file: Path, number: int, cells: Sequence[str | None]) -> Arrival:
    texts = [str(cell or "").strip() for cell in cells]
    try:
        due, prompt, new = texts
        arrival = Arrival(_seconds(due), int(prompt), int(new))
    except ValueError as error:
        read = ", ".join(map(shown, texts))
        raise BadRequest(f"runner.trace={file} line {number}: {read} are no time and two numbers of tokens") from error
    if arrival.prompt_tokens < 1 or arrival.max_new_tokens < 1 or not math.isfinite(arrival.due_s):
        raise BadRequest(f"runner.trace={file} line {number}: it has no prompt token, no token to generate or no time")
    return arrival


def _seconds(text: str) -> float:
    """Of a number of seconds, or of a date to the microsecond. One without a zone is in UTC: clocks there never change."""
    try:
        return float(text)
    except ValueError:
        date = datetime.fromisoformat(text)
        return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
