"""Encoders of categories as networks: their codes, and categories that no fit has seen."""

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn", reason="pip install '.[windtunnel]'")

from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, OrdinalEncoder, TargetEncoder
from translations import NAMED, assert_same, categories, scores, unseen

from models.tabular.encoders import BinaryEncoder, Bucketizer, HashEncoder, OnlineTargetEncoder, TwoHotEncoder
from systems.windtunnel.translate import translate


@pytest.mark.parametrize(
    "encoder",
    [
        OneHotEncoder(handle_unknown="ignore"),
        OneHotEncoder(handle_unknown="infrequent_if_exist", min_frequency=9, sparse_output=False),
        OneHotEncoder(drop="if_binary", handle_unknown="ignore"),
        OneHotEncoder(drop="first", handle_unknown="ignore"),
        OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1),
        TargetEncoder(random_state=0),
        BinaryEncoder(),
        BinaryEncoder(min_count=9),
        TwoHotEncoder(keep_share=0.9),
        HashEncoder(num_columns=7),
        OnlineTargetEncoder(min_count=3),
    ],
    ids=repr,
)
def test_encoders_and_categories_not_seen(encoder: Any) -> None:
    x, y = categories()
    columns = ColumnTransformer([("encoded", encoder, NAMED), ("number", SimpleImputer(), ["distance"])])
    model = make_pipeline(columns, LogisticRegression()).fit(x, y)
    assert_same(model, unseen(x))
    report = {line.operator.split(" (")[0]: line.became for line in translate(model).report}
    assert report == {"encoded": "Embeddings", "number": "kept", "logisticregression": "Linear"}


def test_an_encoder_that_refuses_what_it_has_not_seen_refuses_here_too() -> None:
    x, y = categories()
    model = make_pipeline(ColumnTransformer([("encoded", OneHotEncoder(), NAMED)]), LogisticRegression()).fit(x, y)
    assert_same(model, x)
    with pytest.raises(ValueError, match=r"encoded \(OneHotEncoder\) has not seen the category 'ZZ' of its column 0"):
        translate(model).inputs(unseen(x))


def test_the_codes_are_those_of_the_figure() -> None:
    """Figure 5.3: binary digits, two digits one-hot, and rows of their own for what a hash lets collide."""
    column = np.array([["a"], ["b"], ["c"], ["d"], ["e"]])
    assert BinaryEncoder().fit_transform(column).tolist() == [[1, 0, 0], [0, 1, 0], [1, 1, 0], [0, 0, 1], [1, 0, 1]]
    two_hot = TwoHotEncoder().fit_transform(column)
    assert two_hot.tolist() == [
        [1, 0, 0, 1, 0, 0],
        [1, 0, 0, 0, 1, 0],
        [1, 0, 0, 0, 0, 1],
        [0, 1, 0, 1, 0, 0],
        [0, 1, 0, 0, 1, 0],
    ]
    y = np.array([0, 1, 0, 1, 1] * 20)
    x = np.tile(column, (20, 1))
    model = make_pipeline(HashEncoder(num_columns=2), LogisticRegression()).fit(x, y)
    codes = model[0].codes_[0][1:]
    first, second = next((i, j) for i in range(5) for j in range(i) if (codes[i] == codes[j]).all() and y[i] != y[j])
    translation = translate(model)
    optimizer = torch.optim.Adam(translation.network.parameters(), 1e-2)
    torch.nn.functional.binary_cross_entropy_with_logits(
        translation.network(*translation.inputs(x))[:, 0], torch.tensor(y, dtype=torch.float32)
    ).backward()
    before = scores(translation, column)
    optimizer.step()
    after = scores(translation, column)
    assert before[first] == before[second] and after[first] != after[second]


def test_online_means_know_rows_before_alone() -> None:
    x, y = np.array([["a"], ["b"], ["a"], ["a"]]), np.array([1, 0, 0, 1])
    encoder = OnlineTargetEncoder()
    assert encoder.fit_transform(x, y)[:, 0].tolist() == [0.5, 0.5, 1.0, 0.5]
    np.testing.assert_allclose(encoder.transform(x), [[2 / 3, 0.75], [0.0, 0.25], [2 / 3, 0.75], [2 / 3, 0.75]])


def test_bins_hold_equal_shares() -> None:
    x = np.random.default_rng(0).normal(size=(3200, 1))
    counts = np.bincount(Bucketizer().fit_transform(x)[:, 0].astype(int))
    assert len(counts) == 32 and counts.min() >= 99 and counts.max() <= 101
    assert np.isnan(Bucketizer().fit(x).transform([[np.nan]])).all()
