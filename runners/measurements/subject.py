"""What a measurement sees of a cell's session. It knows no more of how the cell was loaded and prepared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from results.calls import Correctness
from results.cell import Cell
from results.limits import Limits

if TYPE_CHECKING:
    from torch import Tensor, nn

    from models import Model
    from systems.scheduling.graph.program import Program


class Subject(Protocol):
    """A cell that is loaded and, but for `before_preparing`, prepared."""

    @property
    def cell(self) -> Cell:
        """What was asked for."""

    @property
    def device(self) -> str:
        """ "cpu" or "cuda"."""

    @property
    def visible_device(self) -> str:
        """The device as NVML names it."""

    @property
    def model(self) -> Model:
        """The model on its device, in its precision."""

    @property
    def module(self) -> nn.Module:
        """The eager module."""

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """Of every call."""

    @property
    def program(self) -> Program | None:
        """The module as captured, where the system captures operators."""

    @property
    def is_rewritten(self) -> bool:
        """Have passes made other operators of the model's?"""

    @property
    def is_captured(self) -> bool:
        """Is a call one replay of one CUDA Graph?"""

    @property
    def streams(self) -> int:
        """The streams that a call's operators run on."""

    @property
    def system_bytes(self) -> dict[str, int]:
        """What the system knows of its memory, bytes by name."""

    @property
    def known_limits(self) -> Limits | None:
        """The model's, where a sibling has measured them."""

    @property
    def undisturbed_ms(self) -> float | None:
        """Milliseconds of a call before any profiler, once `time_undisturbed` was called."""

    def call(self) -> object:
        """One call of the prepared system. On a GPU it may return before the work is done."""

    def warm_up(self) -> int:
        """Call until calls are steady, unless they are; returns how many calls that took."""

    def compare(self) -> Correctness:
        """The prepared system beside eager."""

    def time_undisturbed(self) -> None:
        """Note `undisturbed_ms`."""
