"""What of older records is known by now to be wrong, taken out where they are read."""

from typing import Any

from .course import Course

UNCAPTURED = ("eager", "torchscript", "torch_compile")  # systems of which a call is not one graph
STRETCHED = "its counters were put over the time of a profiled call, which is longer than a call"
OTHERS = "it was not told whether they are of the model or of what a system had rewritten it to"


def amended(record: dict[str, Any]) -> dict[str, Any]:
    """The record without what is known to be wrong in it."""
    return _without_others_limits(_without_stretched_counters(record))


def _without_others_limits(record: dict[str, Any]) -> dict[str, Any]:
    """Without the limits that a system which rewrites the model had from whichever of its siblings was measured first, and
    which could be of a model rewritten otherwise. So it was until it had its own beside the model's (rewritten).
    """
    limits = record.get("limits") or {}
    if (
        not (record.get("schedule") or {}).get("rewriting")
        or limits.get("critical_path_ms") is None
        or "rewritten" in limits
    ):
        return record
    return record | {"limits": {"critical_path_ms": None, "busy_ms": None, "macs": limits.get("macs"), "reason": OTHERS}}


def _without_stretched_counters(record: dict[str, Any]) -> dict[str, Any]:
    """Without the counters of a captured graph that were put over the time that it took under Nsight Compute,
    which is longer than an undisturbed call and not twice the same. So they were until records told that time (profiled_ms).

    The mean of the estimated course, where there is one, takes the place of counted warps.
    """
    system = record["config"]["system"]
    if system["name"] in UNCAPTURED or system.get("capture") is False:
        return record
    found = {name: record.get(name) or {} for name in ("sm_efficiency", "active_warps")}
    wrong = {n: f for n, f in found.items() if f.get("source") == "counters" and "profiled_ms" not in f}
    right = {n: f | {"value": None, "source": None, "reason": STRETCHED} for n, f in wrong.items()}
    if course := wrong.get("active_warps", {}).get("estimated_course"):
        right["active_warps"] |= {"value": Course.from_json(course).mean, "source": "estimated"}
    return record | right
