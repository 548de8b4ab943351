"""What of older records is known by now to be wrong, taken out where they are read."""

from typing import Any

from .course import Course

UNCAPTURED = ("eager", "torchscript", "torch_compile")  # systems of which a call is not one graph
STRETCHED = "its counters were put over the time of a profiled call, which is longer than a call"


def amended(record: dict[str, Any]) -> dict[str, Any]:
    """The record without the counters of a captured graph that were put over the time that it took under Nsight Compute,
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
