"""What speaks against trusting a record, as data; its sentence is made where it is shown."""

from dataclasses import dataclass, field

from conf import Value

# A sentence a kind, with the warning's values by name. What can be done stands in it where something can.
SENTENCES = {
    "latency_scatters": "latency scatters: (p90 - p10) / median is {spread:.0%}",
    "throttled": "the GPU is throttled: {reasons}",
    "not_alone": "not alone on the GPU: process {process} holds {mebibytes} MiB",
    "differs_in_rounds": "in the rounds it took {ratio:.2f} times as long as when it was measured alone",
    "busy_cpu": "other processes took {load:.0%} of the {cores} cores while it was measured",
    "busy_rounds": "no ratio: other processes took {load:.0%} of the {cores} cores during the rounds",
    "apart_in_rounds": "no ratio: in the rounds it took {ratio:.2f} times as long as when it was measured alone",
    "no_ratio": "no ratio: in the interleaved rounds it ended as {status} ({reason})",
    "no_margin": "no margin: its second process ended in the rounds as {status} ({reason})",
    "no_second_context": "the GPU has no room for another context: a CUDA Graph may be slower here than in the rounds",
    "profiled_before_timing": "a profiler was in its process before it was timed, which slows its launches",
    "late_load": "the load generator sent late, at p99 by {lag_ms:.1f} ms: the trace is not quite the one asked for",
    "notice": "{text}",  # of a system, in its own words
}


@dataclass(frozen=True)
class Warning:
    """One doubt. Raises ValueError for a kind that has no sentence, or values that do not fill it.

    Args:
        kind: a key of SENTENCES.
        values: what its sentence tells, by name.
    """

    kind: str
    values: dict[str, Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in SENTENCES:
            raise ValueError(f"no warning is of the kind {self.kind!r}: there is {', '.join(SENTENCES)}")
        try:
            self.sentence  # noqa: B018 - it is made once to see that it can be
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(f"a warning of the kind {self.kind} lacks {error}") from error

    @property
    def sentence(self) -> str:
        return SENTENCES[self.kind].format(**self.values)
