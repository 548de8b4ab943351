"""A report's answer: the fastest system of each row, what is level with it, and what decides."""

from dataclasses import replace

from made_records import cell, latency, rounds
from made_records import record as made_record

from results.cell import named
from results.limits import Limits
from results.record import Record
from results.selection import Selection
from results.warning import Warning
from scripts.page.answer import answer, fastest


def test_the_answer_of_made_up_records_is_as_one_works_it_out() -> None:
    """Of three models nimble is the fastest of two. Two are level with it once: their intervals begin within nimble's. One
    is within what two processes may differ by. One more model has one system, so that there is nothing to compare."""
    milliseconds = {
        ("bert", "nimble"): (1.0, 1.0, 1.1, 1.2, 1.2),
        ("bert", "opara"): (1.15,) * 5,
        ("bert", "torchscript"): (1.18,) * 5,
        ("bert", "eager"): (2.2,) * 5,
        ("gpt2", "nimble"): (3.0,) * 5,
        ("gpt2", "opara"): (3.1,) * 5,
        ("t5", "opara"): (8.0,) * 5,
        ("t5", "nimble"): (9.5,) * 5,
        ("vgg16", "nimble"): (1.0,) * 5,
    }
    # Opara's kernels of bert take longer. What nimble rewrites gpt2 to has a shorter path, and takes longer to launch.
    limits = {
        ("bert", "nimble"): Limits(1.0, 2.0, sm_area_ms=0.25, traffic_ms=0.1, launch_ms=0.2),
        ("bert", "opara"): Limits(1.05, 2.0, sm_area_ms=1.04, traffic_ms=0.1, launch_ms=0.2),
        ("gpt2", "opara"): Limits(2.0, 2.0, launch_ms=0.5),
        ("gpt2", "nimble"): Limits(2.0, 2.0, launch_ms=0.5, rewritten=Limits(1.0, 2.0, sm_area_ms=1.5, launch_ms=0.1)),
    }
    records = [
        made_record(of=cell(system, model, device="cuda"), latency=latency(*times), limits=limits.get((model, system)))
        for (model, system), times in milliseconds.items()
    ]
    eager = named("system", "eager")
    by_model = {one.row[0]: one for one in fastest(Selection(records), eager)}
    assert {model: (one.system.label, one.systems) for model, one in by_model.items()} == {
        **{"bert": ("nimble", 4), "gpt2": ("nimble", 2), "t5": ("opara", 2)},
    }
    assert {model: [system.label for system in one.level] for model, one in by_model.items()} == {
        **{"bert": ["opara", "torchscript"], "gpt2": ["opara"], "t5": []},
    }
    assert {model: next(iter(one.bounds.items()), None) for model, one in by_model.items()} == {
        **{"bert": ("critical path", 1.0), "gpt2": ("SM area", 1.5), "t5": None},
    }
    assert [one.distance for one in by_model.values()] == [1.1, 2.0, None]
    assert by_model["bert"].bounds["SM area"] == 0.25
    said = answer(Selection(records), eager)
    assert said is not None and said.sentence == (
        "nimble is the fastest for 2 of 3 pairs of a model and a batch, opara for 1."
        " In 2 of 3 the fastest is level with another: two processes of one system may differ so."
        " 3 of 3 are decided without rounds, by latencies each measured alone: the systems did not take turns."
        " The fastest takes 1.10 to 2.00 times the bound of the operators that were profiled (median 1.55, 2 rows)."
    )


def test_what_lies_within_the_margin_of_two_processes_is_level() -> None:
    def levels(*again_ms: float) -> list[str]:
        records = [
            made_record(system, latency=latency(ms), comparison=rounds("g", *[[ms]] * 3))
            for system, ms in (("nimble", 1.0), ("opara", 1.03), ("ios", 1.2))
        ]
        first = records[0].comparison
        assert first is not None
        records[0] = replace(records[0], comparison=replace(first, again=tuple((ms,) for ms in again_ms) or None))
        (one,) = fastest(Selection(records), named("system", "eager"))
        return [system.label for system in one.level]

    assert levels(1.0, 1.0, 1.0) == [] and levels(1.04, 1.05, 1.04) == ["opara"] and levels(0.96, 0.95, 0.96) == ["opara"]
    assert levels() == ["opara"]  # nobody measured the margin here: it is that of others


def test_what_each_of_two_sets_of_rounds_shows_clearly_is_not_level() -> None:
    """Of two sets the common interval holds 1, whose ends Student's distribution of one degree of freedom gives."""

    def levels(*slower_by: float) -> list[str]:
        records = [
            made_record(
                system,
                latency=latency(1.0),
                comparison=replace(rounds(group, *[[ms]] * 5), when=f"2026-01-0{i + 1}"),
                when=f"2026-01-0{i + 1}",
            )
            for i, (group, times) in enumerate(zip("gh", slower_by, strict=True))
            for system, ms in (("nimble", 1.0), ("ios", times))
        ]
        ratio = Selection(records).over(("nasnet", 1), named("system", "nimble"), named("system", "ios"))
        assert ratio is not None and ratio.low < 1 < ratio.high and ratio.processes == 2
        (one,) = fastest(Selection(records), named("system", "eager"))
        return [system.label for system in one.level]

    assert levels(1.5, 3.0) == [] and levels(1.05, 3.0) == ["ios"]


def test_rounds_decide_what_is_the_fastest_and_not_latencies_alone() -> None:
    """Alone nimble is the fastest; in turn opara is, by a fifth of nimble's time and a third of eager's."""
    times_ms = {"nimble": (1.0, 1.25), "opara": (1.1, 1.0), "eager": (1.05, 1.5)}
    records = [
        made_record(system, latency=latency(alone), comparison=rounds("g", *[[in_turn]] * 3))
        for system, (alone, in_turn) in times_ms.items()
    ]
    (one,) = fastest(Selection(records), named("system", "eager"))
    assert (one.system.label, one.latency.host.median, one.level, one.not_in_turn) == ("opara", 1.1, (), None)


def test_older_rounds_do_not_overturn_what_newer_code_takes() -> None:
    """nimble was slower than ios by older code. By newer code it is twice as fast as that, and weave is level with it."""

    def measured(system: str, alone: float, in_turn: float, group: str, when: str) -> Record:
        return made_record(system, latency=latency(alone), comparison=rounds(group, *[[in_turn]] * 3), when=when)

    older = [measured(s, ms, ms, "old", "2026-01-01") for s, ms in (("nimble", 2.2), ("ios", 2.0))]
    newer = [measured(s, ms, t, "new", "2026-02-01") for s, ms, t in (("nimble", 1.0, 0.99), ("weave", 0.99, 1.0))]
    (one,) = fastest(Selection([*older, *newer]), named("system", "eager"))
    assert (one.system.label, one.not_in_turn) == ("nimble", None) and "ios" not in {s.label for s in one.level}
    (one,) = fastest(Selection([older[1], *newer[:1]]), named("system", "eager"))
    assert one.system.label == "nimble" and one.not_in_turn == "the systems did not take turns"
    (one,) = fastest(Selection([*older, *newer[:1]]), named("system", "eager"))
    assert one.system.label == "nimble" and one.not_in_turn == "the newest records are of two sweeps"


def test_the_answer_says_which_rows_the_rounds_do_not_decide() -> None:
    def said(*warnings: Warning) -> str:
        records = [
            made_record(
                of=cell(system, model, device="cuda"),
                latency=latency(milliseconds),
                limits=Limits(1.0, 2.0),
                comparison=rounds(model, [milliseconds], [milliseconds]),
                warnings=warnings if model == "bert" else (),
            )
            for model in ("bert", "gpt2")
            for system, milliseconds in (("nimble", 1.6), ("eager", 3.2))
        ]
        told = answer(Selection(records), named("system", "eager"))
        assert told is not None
        return told.sentence

    busy = Warning("busy_rounds", {"load": 0.76, "cores": 2})
    first, path = (
        "nimble is the fastest for 2 of 2 pairs of a model and a batch.",
        "times the bound of the operators that were profiled",
    )
    assert said() == f"{first} The fastest takes 1.60 {path} (2 rows)."
    assert said(busy) == (
        f"{first} 1 of 2 is decided without rounds, by latencies each measured alone:"
        f" other processes took 76% of the 2 cores during the rounds. The fastest takes 1.60 {path} (2 rows)."
    )
