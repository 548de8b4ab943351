"""Nimble (Kwon et al., NeurIPS 2020). As a library: `from systems.nimble import Nimble`."""

from .module import Nimble

__all__ = ["Nimble"]
