"""A fitted scikit-learn pipeline as a network (dissertation, section 5.2).

Invariant: what has no translation stands before the first operator that has one, on every way from a column to the
prediction. It stays on the host, and its output is an input of the network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.utils import get_tags
from torch import Tensor, nn

from models.neural.embeddings import Embeddings
from models.neural.forests import ForestLeaves, HardForest, SoftForest
from models.neural.graph import Chain, Network, Slot, Union, Within
from models.neural.linear import Columns
from models.neural.lookups import LookupForest
from models.neural.trees import TreeEnsemble

from .base import Converter, Form, Link, Translated, Untranslatable
from .converters import bayes, decomposition, encoders, factorization, linear, neighbours, normalizers, trees
from .inputs import Beside, Kept, Lookup, Source, Step, Table, Take

CONVERTERS: dict[tuple[str, str], Converter] = {
    **linear.CONVERTERS,
    **normalizers.CONVERTERS,
    **decomposition.CONVERTERS,
    **neighbours.CONVERTERS,
    **bayes.CONVERTERS,
    **trees.CONVERTERS,
    **encoders.CONVERTERS,
    **factorization.CONVERTERS,
}
TRANSFORMERS: dict[tuple[str, str], Converter] = {**CONVERTERS, **decomposition.TRANSFORMERS, **neighbours.TRANSFORMERS}
SEQUENCE, BRANCHES, UNION = "Pipeline", "ColumnTransformer", "FeatureUnion"
PASSING_NAN = (  # what they take of it they give on
    *("StandardScaler", "MinMaxScaler", "MaxAbsScaler", "RobustScaler", "QuantileTransformer", "PowerTransformer"),
    *("FunctionTransformer", "VarianceThreshold", "Bucketizer"),
)
SPARSE = ("CountVectorizer", "TfidfVectorizer", "HashingVectorizer", "FeatureHasher", "LeafEncoder")  # what they give
DENSE = ("PCA", "TruncatedSVD", "KMeans", "MiniBatchKMeans")  # what they give, of sparse rows too


@dataclass(frozen=True)
class Line:
    """A line of the report: an operator, and what it became; `became` is "kept" where it stays on the host."""

    operator: str
    became: str


@dataclass(frozen=True, eq=False)
class Forest:
    """Trees within a network.

    Attributes:
        module: the forest.
        ensemble: its trees.
        source: the part of the network that gives its input.
    """

    module: nn.Module
    ensemble: TreeEnsemble
    source: nn.Module


@dataclass(frozen=True, eq=False)
class Translation:
    """A translated pipeline.

    Attributes:
        network: inputs -> raw scores, [B, K].
        sources: how each input is made of a table.
        link: what makes predictions of raw scores.
        report: what each operator became.
        forests: the trees.
        predictor: the last operator's module, which scope "last" trains alone.
        form: how it was translated.
    """

    network: Network
    sources: tuple[Source, ...]
    link: Link
    report: tuple[Line, ...]
    forests: tuple[Forest, ...]
    predictor: nn.Module
    form: Form

    def inputs(self, x: Any, device: torch.device | str = "cpu") -> tuple[Tensor, ...]:
        """The network's inputs of B rows, a table, a matrix or a `Table`, on a device."""
        table, is_pinned = x if isinstance(x, Table) else Table(x), torch.device(device).type == "cuda"
        inputs = (source(table, self.form.dtype, is_pinned) for source in self.sources)
        return tuple(tensor.to(device, non_blocking=is_pinned) for tensor in inputs)


@dataclass(frozen=True, eq=False)
class _Host:
    """A value on the host: the steps from the table to it, and where branches make it those of each."""

    steps: tuple[Step, ...] = ()
    branches: tuple[_Host, ...] = ()

    @property
    def apart(self) -> tuple[Step, ...]:
        """The same value by its branches, each of whose operators is called by itself."""
        return (Beside(tuple(branch.apart for branch in self.branches)),) if self.branches else self.steps


@dataclass(frozen=True, eq=False)
class _Neural:
    """A value within the network, the part that gives it, and the operator that gave it."""

    part: nn.Module
    operator: str


_Value: TypeAlias = _Host | _Neural


class _Branch(NamedTuple):
    """An operator beside others, and the places of its columns, None for all. is_flat: as a Table has it."""

    name: str
    operator: Any
    places: tuple[int, ...] | None
    is_flat: bool = False


@dataclass(eq=False)
class _Translator:
    form: Form
    sources: list[Source] = field(default_factory=list)
    report: list[Line] = field(default_factory=list)
    forests: list[Forest] = field(default_factory=list)
    link: Link | None = None
    predictor: nn.Module | None = None

    def slot(self, source: Source) -> Slot:
        """The place of an input; equal ones are one."""
        for place, known in enumerate(self.sources):
            if known.steps == source.steps and known.lookup is source.lookup is None:
                return Slot(place)
        self.sources.append(source)
        return Slot(len(self.sources) - 1)

    def part(self, value: _Value) -> nn.Module:
        """A value within the network; one on the host becomes an input."""
        return value.part if isinstance(value, _Neural) else self.slot(Source(value.apart))

    def operator(self, name: str, operator: Any, value: _Value, is_last: bool) -> _Value:
        """What an operator makes of a value. Raises Untranslatable."""
        if _passes(operator):
            return value
        kind = type(operator).__name__
        if _library(operator) == "sklearn":
            if kind == SEQUENCE:
                return self.sequence(operator.steps, value, is_last)
            if kind in (BRANCHES, UNION) and operator.transformer_weights:
                return self.kept(name, operator, value, is_last)
            if kind == BRANCHES:
                return self.branches(name, operator, _branches(operator), value)
            if kind == UNION:
                every = [
                    _Branch(name, transformer, None)
                    for name, transformer in operator.transformer_list
                    if transformer != "drop"
                ]
                return self.branches(name, operator, every, value)
        named = _named(name, operator)
        converter = (CONVERTERS if is_last else TRANSFORMERS).get((_library(operator), kind))
        if converter is None:
            return self.kept(name, operator, value, is_last)
        translated = converter(operator, named, self.form)
        if translated.link is not None and not is_last:
            return self.kept(name, operator, value, is_last)  # a predictor where a transformer is asked for
        return self.put(named, translated, value)

    def put(self, named: str, translated: Translated, value: _Value) -> _Neural:
        """A translated operator behind a value."""
        if translated.categories is None:
            source = self.part(value)
        elif isinstance(value, _Neural):
            raise Untranslatable(
                f"{named} looks up categories on the host, and stands behind {value.operator}, which is translated"
            )
        else:
            lookup = Lookup(named, translated.categories, translated.refuses_unknown)
            source = self.slot(Source(value.steps, lookup))
        if translated.ensemble is not None:
            module = translated.module.forest if isinstance(translated.module, ForestLeaves) else translated.module
            if isinstance(module, SoftForest) and not _may_be_missing(source):
                module.sees_missing = False
            self.forests.append(Forest(module, translated.ensemble, source))
        module = translated.module
        part: nn.Module = Chain(source, module)
        if isinstance(module, HardForest) and translated.ensemble is not None:
            lookups = LookupForest.of(source, translated.ensemble, self.form.dtype)
            module, part = (lookups, lookups) if lookups is not None else (module, part)  # with what they look at
        self.report.append(Line(named, type(module).__name__))
        if translated.link is not None:
            self.link = translated.link
        self.predictor = module
        return _Neural(part, named)

    def kept(self, name: str, operator: Any, value: _Value, is_last: bool) -> _Host:
        """An operator that stays on the host. Raises Untranslatable."""
        named = _named(name, operator)
        if is_last or not hasattr(operator, "transform"):
            raise Untranslatable(f"{named} has no translation, and what comes last in a pipeline needs one")
        if isinstance(value, _Neural):
            raise Untranslatable(f"{named} has no translation, and stands behind {value.operator}, which is translated")
        self.report.append(Line(named, "kept"))
        return _Host((*value.steps, Kept(named, operator)))

    def sequence(self, steps: list[tuple[str, Any]], value: _Value, is_last: bool) -> _Value:
        for i, (name, operator) in enumerate(steps):
            value = self.operator(name, operator, value, is_last and i == len(steps) - 1)
        return value

    def branches(self, name: str, whole: Any, branches: Sequence[_Branch], value: _Value) -> _Value:
        """Operators side by side. Where none is translated, the whole stays on the host."""
        if isinstance(value, _Neural):
            inner = [self.operator(b.name, b.operator, _Neural(_columns(b.places), value.operator), False) for b in branches]
            parts = [part.part for part in inner if isinstance(part, _Neural)]
            return _Neural(Chain(value.part, Within(Union(parts))), value.operator)
        values: list[_Value] = []
        for branch in branches:
            steps = value.steps if branch.places is None else (*value.steps, Take(branch.places, branch.is_flat))
            values.append(self.operator(branch.name, branch.operator, _Host(steps), False))
        operators = [v.operator for v in values if isinstance(v, _Neural)]
        if not operators:
            own = tuple(v for v in values if isinstance(v, _Host))
            return _Host((*value.steps, Kept(_named(name, whole), whole)), own)
        return _Neural(Union([self.part(v) for v in values]), operators[0])


def allows_missing(operator: Any, num_columns: int) -> tuple[bool, ...]:
    """Of each column of a table whether a fitted operator takes NaN: whatever sees it, up to what leaves none.

    Args:
        operator: of scikit-learn, or a library's in its form.
        num_columns: of the table.
    """
    return tuple(_missing(operator, num_columns)[0].tolist())


def _missing(operator: Any, num_columns: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Of each column whether an operator takes NaN, and whether NaN may stand in what it gives then."""
    takes, gives = np.ones((2, num_columns), dtype=np.bool_)
    if _passes(operator):
        return takes, gives
    kind = type(operator).__name__
    if kind == SEQUENCE:
        for place, (_, step) in enumerate(operator.steps):
            step_takes, step_gives = _missing(step, num_columns if place == 0 else getattr(step, "n_features_in_", 1))
            if place == 0:
                takes, gives = step_takes, step_gives
            else:  # which of its columns come from which is not known
                takes, gives = takes & (step_takes.all() | ~gives), gives & step_gives.any()
        return takes, gives
    if kind in (BRANCHES, UNION):
        gives[:] = False
        for branch, places in _inner(operator, num_columns):
            branch_takes, branch_gives = _missing(branch, len(places))
            takes[places] &= branch_takes
            gives[places] |= branch_gives
        return takes, gives
    tags = get_tags(operator)
    takes[:] = tags.input_tags.allow_nan or tags.no_validation
    return takes, takes & (kind in PASSING_NAN)


def _inner(operator: Any, num_columns: int) -> list[tuple[Any, list[int]]]:
    """The operators of a ColumnTransformer or a FeatureUnion, and the places of their columns."""
    if type(operator).__name__ == BRANCHES:
        return [(branch.operator, list(branch.places or ())) for branch in _branches(operator)]
    return [(inner, list(range(num_columns))) for _, inner in operator.transformer_list if inner != "drop"]


def _is_sparse(operator: Any, is_given: bool = False) -> bool:
    """Does a fitted operator give a sparse matrix? Raises Untranslatable where one comes to trees that miss its zeros.

    is_given: it takes one.
    """
    kind = type(operator).__name__
    if _passes(operator):
        return is_given
    if kind == SEQUENCE:
        for _, step in operator.steps:
            is_given = _is_sparse(step, is_given)
        return is_given
    if kind == UNION:
        return any(_is_sparse(inner, is_given) for _, inner in operator.transformer_list if inner != "drop")
    if is_given and _library(operator) == "xgboost":
        raise Untranslatable(
            f"{kind} takes the zeros of a sparse matrix for missing values, which has no translation: "
            "make it dense by sparse_output=False of an encoder, or sparse_threshold=0 of a ColumnTransformer"
        )
    if kind == "KBinsDiscretizer":
        return bool(operator.encode == "onehot")
    gives = getattr(operator, "sparse_output_", getattr(operator, "sparse_output", None))
    return bool(gives) if gives is not None else kind in SPARSE or (is_given and kind not in DENSE)


def first_step(operator: Any) -> Any:
    """The first operator of a pipeline that does more than pass on; an operator that is no pipeline itself."""
    while type(operator).__name__ == SEQUENCE and _library(operator) == "sklearn":
        steps = [step for _, step in operator.steps]
        operator = next((step for step in steps if not _passes(step)), steps[-1])
    return operator


def _passes(operator: Any) -> bool:
    """Does this step of a pipeline leave what it takes?"""
    return operator is None or (isinstance(operator, str) and operator == "passthrough")


def _columns(columns: tuple[int, ...] | None) -> nn.Module:
    return Slot(0) if columns is None else Chain(Slot(0), Columns(columns))


def _branches(operator: Any) -> Sequence[_Branch]:
    """The transformers of a fitted ColumnTransformer with the places of their columns, without what has none."""
    every = []
    for name, transformer, columns in operator.transformers_:
        places = tuple(int(place) for place in operator._transformer_to_input_indices[name])
        if places and not (isinstance(transformer, str) and transformer == "drop"):
            is_passing = type(transformer).__name__ == "FunctionTransformer" and transformer.func is None
            every.append(_Branch(name, "passthrough" if is_passing else transformer, places, np.isscalar(columns)))
    return every


def _may_be_missing(source: nn.Module) -> bool:
    """May what a part of the network gives be NaN? Embeddings only give what is in their tables; an input of numbers may."""
    if isinstance(source, Union):
        return any(_may_be_missing(part) for part in source.parts)
    if isinstance(source, Chain) and isinstance(source.operator, Embeddings):
        return any(bool(table.isnan().any()) for table in source.operator.tables)
    return True


def _library(operator: Any) -> str:
    """The library of an operator's own class; ours is "models", also where the project is installed as a package."""
    parts = type(operator).__module__.split(".")
    return "models" if "tabular" in parts and "models" in parts else parts[0]


def _named(name: str, operator: Any) -> str:
    return f"{name} ({type(operator).__name__})"


def translate(pipeline: Any, form: Form | None = None) -> Translation:
    """The network of a fitted pipeline, or of a fitted predictor.

    Args:
        pipeline: of scikit-learn: Pipelines, ColumnTransformers and FeatureUnions of operators.
        form: exact and in float32, unless given.

    Raises:
        Untranslatable: an operator has no translation and cannot stay before all that have.
        sklearn.exceptions.NotFittedError: the pipeline is not fitted.
    """
    from sklearn.exceptions import NotFittedError
    from sklearn.utils.validation import check_is_fitted

    form = form or Form()
    try:
        check_is_fitted(pipeline)
    except NotFittedError:
        raise NotFittedError(f"{type(pipeline).__name__} is not fitted: fit it first, or call fit of WindTunnel") from None
    _is_sparse(pipeline)
    translator = _Translator(form)
    name = type(pipeline).__name__.lower()
    value = translator.operator(name, pipeline, _Host(), is_last=True)
    if translator.link is None or translator.predictor is None:
        raise Untranslatable(f"{name} ends in no predictor, and nothing else can be fine-tuned or compared")
    return Translation(
        Network(translator.part(value)),
        tuple(translator.sources),
        translator.link,
        tuple(translator.report),
        tuple(translator.forests),
        translator.predictor,
        form,
    )
