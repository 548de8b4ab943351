"""WindTunnel: classical pipelines become networks, and are fine-tuned as one (dissertation, chapter 5)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .estimator import WindTunnel as WindTunnel

__all__ = ["WindTunnel"]


def __getattr__(name: str) -> Any:
    """The estimator, whose libraries are optional."""
    if name != "WindTunnel":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from .estimator import WindTunnel
    except ModuleNotFoundError as error:
        if error.name not in ("sklearn", "lightgbm", "safetensors"):
            raise
        raise ImportError(f"WindTunnel needs {error.name}: pip install '.[windtunnel]'") from error
    return WindTunnel
