"""runner=simulated: what a client would see of GPUs that need not be there, from measured costs of one part of the model."""

from __future__ import annotations

from runners.serving.options import SimulatedOptions

from .base import ServingComposition


class SimulatedRun(ServingComposition):
    """A cell that serves under a virtual clock."""

    name = "simulated"
    Options = SimulatedOptions
    session = "runners.serving.simulated_session:SimulatedSession"
    possible = ("serving", "capacity")
    shown_first = ("req/s", "tokens/s", "normalized ms", "req/s at SLO")
