"""What a cell's process answers for later: what takes a profiler comes when nothing is left to be timed in it."""

from typing import Any

AGAIN = "again"  # the status of a cell whose preparation has used a profiler: another process has to measure
NOT_YET = "the sweep ended before it was measured"
# The measurements that profile the process, and what stands for each in a record until then.
PROFILED: dict[str, dict[str, Any]] = {
    "sm_efficiency": {"value": None, "source": None, "reason": NOT_YET, "profiled_ms": None},
    "active_warps": {"value": None, "source": None, "reason": NOT_YET, "profiled_ms": None, "estimated_course": None},
    "kernels": {"count": None, "sum_ms": None, "covered_ms": None, "reason": NOT_YET},
    "limits": {"critical_path_ms": None, "busy_ms": None, "reason": NOT_YET},
}
