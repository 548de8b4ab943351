"""Reads what torch.profiler writes as a Chrome trace: which labelled piece of code launched what on the device."""

import json
import re
import tempfile
from bisect import bisect_right
from pathlib import Path
from typing import Any

from torch.profiler import profile

LAUNCHES = ("cuda_runtime", "cuda_driver")  # categories of the calls that launch
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # and of what they launch
OPERATOR = re.compile(r".*::|graph_\d+_")  # an operator's name, or that of a kernel which Inductor made


def exported(profiler: profile) -> dict[str, Any]:
    """The Chrome trace of a profiler that has stopped, as data."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def launched_under(trace: dict[str, Any], prefix: str) -> dict[str, list[dict[str, Any]]]:
    """The kernels and copies of a trace by the label (a record_function that begins with `prefix`) they were launched under,
    in the order of launching.

    What ran on the device is matched by correlation id with the call that launched it, and that call lies, on its own
    thread, within the label. Where something stands in the trace, or when it ran, says nothing. Every label is a key, with
    an empty list where it launched nothing. Raises ValueError where the trace lacks the call that launched something.
    """
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    labels: dict[tuple[Any, Any], list[tuple[float, float, str]]] = {}  # by thread: (begin, end, label)
    launches: dict[int, dict[str, Any]] = {}
    for event in events:
        category = event.get("cat")
        if category == "user_annotation" and event["name"].startswith(prefix):
            span = (event["ts"], event["ts"] + event["dur"], event["name"].removeprefix(prefix))
            labels.setdefault((event["pid"], event["tid"]), []).append(span)
        elif category in LAUNCHES and "correlation" in event["args"]:
            launches[event["args"]["correlation"]] = event
    for spans in labels.values():
        spans.sort()
    found: dict[str, list[tuple[float, dict[str, Any]]]] = {label: [] for spans in labels.values() for *_, label in spans}
    for event in events:
        if event.get("cat") not in ON_DEVICE:
            continue
        launch = launches.get(event["args"]["correlation"])
        if launch is None:
            raise ValueError(f"the trace does not say what launched {event['name']}")
        spans = labels.get((launch["pid"], launch["tid"]), [])
        place = bisect_right(spans, launch["ts"], key=lambda span: span[0]) - 1
        if place >= 0 and launch["ts"] < spans[place][1]:
            found[spans[place][2]].append((launch["ts"], event))
    return {label: [event for _, event in sorted(of, key=lambda e: e[0])] for label, of in found.items()}


def on_device(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """The kernels and copies of a trace, by the time at which they began."""
    found = [e for e in trace["traceEvents"] if e.get("ph") == "X" and e.get("cat") in ON_DEVICE]
    return sorted(found, key=lambda e: e["ts"])


def outermost_operators(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """The operators that ran on the CPU and were called by no other, by the time at which they began.

    What torch.compile notes of itself is none, and neither is a region that it compiled, but what runs within one.
    """
    found: list[dict[str, Any]] = []
    ends: dict[tuple[Any, Any], float] = {}
    seen = (e for e in trace["traceEvents"] if e.get("cat") == "cpu_op" and OPERATOR.match(e["name"]))
    for event in sorted(seen, key=lambda e: (e["ts"], -e["dur"])):
        thread = event["pid"], event["tid"]
        if event["ts"] >= ends.get(thread, 0.0):
            ends[thread] = event["ts"] + event["dur"]
            found.append(event)
    return found
