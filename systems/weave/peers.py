"""Weave beside peers: whoever is fastest on this model here executes it, and the record says who that is."""

import warnings
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import conf
from conf.text import first_line
from systems.base import BadOption, Compilation, Prepared, System, Unsupported
from systems.cache import code_of
from systems.notice import Notice
from systems.profiling.measurements import Measurements
from systems.registry import load
from systems.scheduling.graph.program import Program
from systems.scheduling.graph.structure import digest, structure, weights
from systems.scheduling.scheduler import captured
from systems.training.restore import state_kept

from . import search, trials
from .reference import Reference, tensors
from .search import MARGIN
from .system import Weave
from .trials import milliseconds

KIND = "weave-peers"
OWN = "weave"
ROUNDS = 7


@dataclass(frozen=True)
class Comparison:
    """What a call of each took, in turn.

    Args:
        own_ms, peer_ms: of the round with the median ratio.
    """

    own_ms: float
    peer_ms: float

    @property
    def ratio(self) -> float:
        return self.peer_ms / self.own_ms


class WeaveOrPeers(System):
    """Weave, or a peer that is clearly faster than it on this model: then that one is handed the whole.

    A gain that is a peer's is no gain of weave's: the record's compilation and a notice name who executes.

    Invariant: a peer is handed the model only where, called in turn, it takes less than MARGIN of weave's time twice, and
    where its answer is as near to the program in fp64 as a cell has to be.

    Args:
        peers: choices of conf/system with "+" between them.
        budget_s, costs, switches: weave's.

    Raises:
        BadOption: an option has another value, or a peer executes no module.
    """

    name = "weave_or_peers"

    def __init__(self, peers: str = "torch_compile", budget_s: float = 120.0, costs: str = "measured", **switches: bool):
        self.weave = Weave(budget_s, "", costs, **switches)
        self.peers = [peer.strip() for peer in peers.split("+") if peer.strip()]
        others = sorted(set(conf.choices("system")) - {OWN, self.name})
        for peer in self.peers:
            if peer not in others:
                raise BadOption(f"system.peers={peers}: no peer is named {peer}: {conf.nearest(peer, others)}")
        self.budget_s, self.costs = budget_s, costs

    @property
    def learns(self) -> bool:
        return True

    def learn(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._winner(captured(module, inputs), module, inputs)

    def prepare(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> Prepared:
        program = captured(module, inputs)
        peer, comparison = self._winner(program, module, inputs)
        if peer is None or comparison is None:
            return self._weave().prepare_program(program)
        with state_kept(module):
            prepared = load(peer).prepare(module, inputs)
        prepared.compilation = replace(prepared.compilation or Compilation(), handed_over=peer)
        message = f"handed over whole to {peer}: {comparison.peer_ms:.3f} ms a call, weave {comparison.own_ms:.3f} ms"
        warnings.warn(message, category=Notice, stacklevel=2)
        return prepared

    def _weave(self) -> Weave:
        self.weave.report, self.weave.clock = self.report, self.clock
        return self.weave

    def _winner(
        self, program: Program, module: nn.Module, inputs: tuple[Tensor, ...]
    ) -> tuple[str | None, Comparison | None]:
        """The peer that is handed the model, and what was measured of it; nothing where weave keeps it."""
        cache = Measurements(KIND, program.device)
        code = code_of(__name__, search.__name__, trials.__name__)
        switches = sorted(self.weave.rewriting.switches)
        name = digest([structure(program), weights(program), switches, self.peers, self.budget_s, self.costs, code])
        if name in cache:
            entry: Any = cache[name]
            comparisons = {str(peer): Comparison(float(own_ms), float(peer_ms)) for peer, (own_ms, peer_ms) in entry.items()}
        else:
            compared = self._compared(program, module, inputs)
            comparisons = {peer: c for peer, c in compared.items() if c is not None}
            if len(comparisons) == len(compared):
                cache.add({name: {peer: [c.own_ms, c.peer_ms] for peer, c in comparisons.items()}})
        fastest = min(comparisons, key=lambda peer: comparisons[peer].ratio, default=None)
        if fastest is None or comparisons[fastest].ratio >= MARGIN:
            return None, None
        return fastest, comparisons[fastest]

    def _compared(self, program: Program, module: nn.Module, inputs: tuple[Tensor, ...]) -> Mapping[str, Comparison | None]:
        """Each peer that runs here, and precisely enough, beside weave; None of one that only lacked memory."""
        comparisons: dict[str, Comparison | None] = {}
        with closing(self._weave().prepare_program(program)) as own:
            for peer in self.peers:
                self.report(f"beside weave: {peer}")
                try:
                    system = load(peer)
                    if reason := system.unsupported(program.device.type):
                        raise Unsupported(reason)
                    system.report = self.report
                    with state_kept(module):
                        compiled = system.prepare(module, inputs)
                    with closing(compiled) as prepared, state_kept(module):
                        excess = Reference(program).excess(tensors(prepared(*inputs)))
                        if excess > 1:
                            self.report(f"{peer} is left out: its error is {excess:.1f} times what it may be")
                            continue
                        comparisons[peer] = _beside(own, prepared, program)
                except Exception as error:  # whatever a compiler raises: weave is there
                    self.report(f"{peer} is left out: {first_line(error)}")
                    if _is_lack_of_memory(error):
                        comparisons[peer] = None
        return comparisons


def _is_lack_of_memory(error: Exception) -> bool:
    """Another time there may be enough. Compilers raise exceptions of their own around torch's."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "out of memory" in str(error).lower()


def _beside(own: Prepared, peer: Prepared, program: Program) -> Comparison:
    """Measured once more where the peer is faster: of several that scatter one looks faster by chance."""
    first = _in_turn(own, peer, program)
    return max(first, _in_turn(own, peer, program), key=lambda c: c.ratio) if first.ratio < MARGIN else first


def _in_turn(own: Prepared, peer: Prepared, program: Program) -> Comparison:
    inputs, rewind = program.examples, program.rewinding()
    rounds = [Comparison(*(milliseconds(each, inputs, rewind) for each in (own, peer))) for _ in range(ROUNDS + 1)]
    return sorted(rounds[1:], key=lambda each: each.ratio)[ROUNDS // 2]
