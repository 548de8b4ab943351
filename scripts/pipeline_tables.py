"""Tables of what learns from tables: WindTunnel, its pipelines and its peers."""

from collections.abc import Callable, Iterable, Sequence
from statistics import mean

from results.accuracy import Accuracy, PredictionTime
from results.record import Record
from results.siblings import Siblings

from .table import Made, Table, made, table
from .tables import needed


def tuned_pipelines(groups: Iterable[Siblings]) -> Table:
    """What learned from a table: AUC, what it gained over the pipeline that was tuned, and its seconds; a row a record."""

    def column(heading: str, text: Callable[[Accuracy], str]) -> Made[Record]:
        return made(heading, lambda record: text(needed(record.accuracy)) if record.is_ok else record.status)

    def mean_of(name: str, part: Accuracy) -> float:
        return mean(needed(getattr(seed, name)) for seed in part.seeds)

    columns: Sequence[Made[Record]] = [
        made("model", lambda record: record.cell.model.label, number=False),
        made("system", lambda record: record.cell.system.label, number=False),
        column("AUC", lambda part: f"{part.auc:.4f} [{part.low:.4f}, {part.high:.4f}]"),
        column("over its pipeline", lambda part: f"{needed(part.gain):+.4f} [{part.gain_low:+.4f}, {part.gain_high:+.4f}]"),
        column("seeds", lambda part: str(len(part.seeds))),
        column("fit s", lambda part: f"{mean_of('fit_s', part):.1f}"),
        column("tune s", lambda part: f"{mean_of('tune_s', part):.1f}"),
    ]
    records = [record for group in groups for record in group.records.values() if record.accuracy is not None]
    return table(columns, sorted(records, key=lambda record: (record.cell.model.label, record.cell.system.label)))


def tuning(groups: Iterable[Siblings]) -> Table:
    """How fast the steps of tuning are; a row a record that says so."""

    def epoch_s(record: Record) -> float:
        return mean(needed(seed.epoch_s) for seed in needed(record.accuracy).seeds)

    columns: Sequence[Made[Record]] = [
        made("model", lambda record: record.cell.model.label, number=False),
        made("system", lambda record: record.cell.system.label, number=False),
        made("rows of a step", lambda record: f"{record.cell.system.options['batch_size']:,}"),
        made("epoch s", lambda record: f"{epoch_s(record):.3f}"),
        made("rows a second", lambda record: f"{needed(record.accuracy).training_rows / epoch_s(record):,.0f}"),
    ]
    parts = (record for group in groups for record in group.records.values() if record.accuracy is not None)
    tuned = [record for record in parts if any(seed.epoch_s is not None for seed in needed(record.accuracy).seeds)]
    return table(columns, sorted(tuned, key=lambda record: (record.cell.model.label, record.cell.system.label)))


def predictions(groups: Iterable[Siblings]) -> Table:
    """Microseconds from a table of a batch to probabilities, and of these the encoders; a row a batch and form of table."""
    records = {record.cell.system.label: record for group in groups for record in group.records.values() if record.is_ok}

    def time_of(record: Record | None, batch: int, form: str) -> PredictionTime:
        times = (time for seed in needed(needed(record).accuracy).seeds for time in seed.predictions)
        return needed(next((time for time in times if (time.batch, time.form) == (batch, form)), None))

    def column(heading: str, text: Callable[[PredictionTime, PredictionTime], str], label: str) -> Made[tuple[int, str]]:
        pipeline = records.get("pipeline")
        return made(heading, lambda row: text(time_of(records.get(label), *row), time_of(pipeline, *row)))

    def whole(time: PredictionTime, pipeline: PredictionTime) -> str:
        return f"{time.us:,.0f} ({time.encode_us:,.0f})"

    others = sorted(label for label in records if label.startswith("translation") or label == "hummingbird")
    columns: list[Made[tuple[int, str]]] = [
        made("batch", lambda row: str(row[0])),
        made("table", lambda row: row[1], number=False),
        column("pipeline", whole, "pipeline"),
        *(column(label, whole, label) for label in others),
        *(column(f"{label} over pipeline", lambda t, p: f"{p.us / t.us:.1f}x", label) for label in others),
    ]
    rows = {(t.batch, t.form) for r in records.values() for s in needed(r.accuracy).seeds for t in s.predictions}
    return table(columns, sorted(rows, key=lambda row: (row[0], row[1] != "values")))
