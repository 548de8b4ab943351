"""What a translated pipeline says beside the pipeline itself, and tables that tests of translations fit."""

from typing import Any

import numpy as np
import pandas as pd
import torch
from sklearn.datasets import load_digits, load_iris, load_wine

from systems.windtunnel.base import Form
from systems.windtunnel.translate import Translation, translate

MOST = 1e-4  # that a raw score may differ by
EXACT = Form(dtype=torch.float64)


def scores(translation: Translation, x: Any) -> torch.Tensor:
    translation.network.eval()
    with torch.no_grad():
        return translation.network(*translation.inputs(x)).double()


def predicted(translation: Translation, x: Any) -> np.ndarray:
    return translation.link.predicted(scores(translation, x)).numpy()


def assert_same(model: Any, x: Any, atol: float = MOST, forms: tuple[Form, ...] = (EXACT, Form())) -> None:
    """Raw scores where there are any, probabilities where there are, in both precisions."""
    for form in forms:
        translation = translate(model, form)
        raw = scores(translation, x).numpy()
        atol_here = 1e-6 if form is EXACT else atol  # XGBoost itself adds in float32
        if hasattr(model, "decision_function"):
            want = np.asarray(model.decision_function(x)).reshape(len(x), -1)
            np.testing.assert_allclose(raw, want, atol=atol_here, rtol=1e-5)
        if hasattr(model, "predict_proba") and translation.link.has_probabilities:
            np.testing.assert_allclose(predicted(translation, x), model.predict_proba(x), atol=atol_here)
        elif not hasattr(model, "decision_function"):
            np.testing.assert_allclose(predicted(translation, x)[:, 0], model.predict(x), atol=atol_here, rtol=1e-5)


IRIS, WINE, DIGITS = (load(return_X_y=True) for load in (load_iris, load_wine, load_digits))


def categories(rows: int = 400, seed: int = 0) -> tuple[pd.DataFrame, np.ndarray]:
    """Two columns of words, one of numbers that name, one of numbers with NaN; and a label."""
    rng = np.random.default_rng(seed)
    x = pd.DataFrame(
        {
            "carrier": rng.choice(["AA", "B6", "DL", "UA"], rows),
            "origin": rng.choice([f"airport {i}" for i in range(40)], rows, p=np.arange(40, 0, -1) / 820),
            "month": rng.integers(1, 13, rows),
            "distance": np.where(rng.random(rows) < 0.1, np.nan, rng.normal(size=rows).astype(np.float32)),
        }
    )
    score = (x["carrier"] == "AA") + (x["month"] > 6) + np.nan_to_num(x["distance"]) + rng.normal(size=rows)
    return x, (score > 0.8).to_numpy().astype(int)


def unseen(x: pd.DataFrame) -> pd.DataFrame:
    """Rows with categories that no fit has seen."""
    return pd.concat([x, x.head(3).assign(carrier="ZZ", origin="nowhere", month=99)], ignore_index=True)


NAMED = ["carrier", "origin", "month"]
