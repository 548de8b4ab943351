"""The model zoo: a name and a batch size become an `nn.Module` with example inputs.

Importing this package does not import torch; loading a model does.
"""

from models.counts import Counts, count
from models.loading import build_ahead, load
from models.model import Model, place
from models.registry import BadModel, names

__all__ = ["BadModel", "Counts", "Model", "build_ahead", "count", "load", "names", "place"]
