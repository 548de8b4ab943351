"""The sweeper: all cells of a sweep at once, so that those to be compared are measured in turn.

Hydra takes plugins from this package alone.
"""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import TYPE_CHECKING

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, RangeSweep
from hydra.core.plugins import Plugins
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

if TYPE_CHECKING:  # Hydra imports every plugin at its start, also on a node
    from runners.request.request import Request
    from runners.sweep.launch import Launch

NEEDED = ("ray", "submitit")  # the package that a launcher needs is how its name begins
HERE = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"  # Hydra's default: cells run in the caller's process
Overrides = tuple[str, ...]


class OpweaveSweeper(BasicSweeper):
    """The cells of a sweep are those of Hydra's own. They are resolved here, once, and run by the caller.

    With hydra/launcher=... the caller gets a Launch, which has each group of cells run where the launcher says.
    """

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config

    def sweep(self, arguments: list[str]) -> None:
        """Resolve every cell, and leave the requests where the caller finds them. Raises BadRequest."""
        from runners.request import composition
        from runners.request.resolve import resolve

        assert self.hydra_context is not None and self.config is not None
        is_elsewhere = self.config.hydra.launcher._target_ != HERE
        loader = self.hydra_context.config_loader
        overrides = OverridesParser.create(config_loader=loader).parse_overrides([*self._parse_config(), *arguments])
        for override in overrides:
            value = override.value()
            if isinstance(value, ChoiceSweep) and composition.NULL in value.tags:
                value.list = [None]
        check_number(overrides, self.config.max_cells)
        cells = [tuple(cell) for cell in self.split_arguments(overrides, None)[0]]
        requests = {}
        for cell in new_values_first(cells):
            config = loader.load_sweep_config(self.config, list(cell))
            request = resolve(config, config.hydra.runtime.choices)
            requests[cell] = request if is_elsewhere else request.decided()
        in_order = [(cell, requests[cell]) for cell in cells]
        if is_elsewhere:
            composition.current().run_elsewhere = self.launch(in_order).run
        else:
            composition.current().requests += [request for _, request in in_order]

    def launch(self, requests: list[tuple[Overrides, Request]]) -> Launch:
        """What runs these cells through the launcher that was asked for. Raises BadRequest."""
        from runners.checks import BadRequest
        from runners.sweep.launch import Launch, grouped, meeting_place

        assert self.hydra_context is not None and self.config is not None and self.task_function is not None
        groups = grouped(requests)
        folder = meeting_place(groups, self.config)  # before the launcher is made, which asks for it
        name = self.config.hydra.runtime.choices["hydra/launcher"]
        package = name.partition("_")[0]
        if package in NEEDED and find_spec(package) is None:
            raise BadRequest(f"hydra/launcher={name} needs {package}: pip install 'opweave[distributed]'")
        launcher = Plugins.instance().instantiate_launcher(
            hydra_context=self.hydra_context, task_function=self.task_function, config=self.config
        )
        return Launch(launcher, self.hydra_context, self.config, name, groups, folder)


def num_values(override: Override) -> float:
    """How many values an override sweeps over; a range is not gone through."""
    value = override.value()
    if isinstance(value, RangeSweep):
        assert value.start is not None and value.stop is not None
        steps = (value.stop - value.start) / value.step if value.step else math.inf
        return max(0, math.ceil(steps)) if math.isfinite(steps) else math.inf
    return sum(1 for _ in override.sweep_string_iterator()) if override.is_discrete_sweep() else 1


def check_number(overrides: list[Override], max_cells: object) -> None:
    """Raise BadRequest where overrides ask for no cell, or for more than `max_cells`, before any cell is made."""
    from runners.checks import BadRequest, positive_integer

    positive_integer("max_cells", max_cells)
    if any(override.key_or_group == "max_cells" and override.is_sweep_override() for override in overrides):
        raise BadRequest("max_cells holds for a whole sweep: give it one value")
    numbers = {override.get_key_element(): num_values(override) for override in overrides}  # of a key the last one counts
    if empty := [override for override in overrides if not numbers[override.get_key_element()]]:
        raise BadRequest(f"{empty[-1].input_line} names no value, so there is nothing to run")
    if (num_cells := math.prod(numbers.values())) > max_cells:  # type: ignore[operator]
        raise BadRequest(f"the sweep asks for {num_cells:,} cells, and max_cells={max_cells}: ask for fewer, or allow more")


def new_values_first(cells: list[Overrides]) -> list[Overrides]:
    """Each cell once. A wrong value is wrong wherever it stands, so those that bring a new one come first."""
    known: set[str] = set()
    bring_new = [cell for cell in cells if not known.issuperset(cell) and not known.update(cell)]
    return list(dict.fromkeys([*bring_new, *cells]))


ConfigStore.instance().store(
    group="hydra/sweeper",
    name="opweave",
    node={"_target_": "hydra_plugins.opweave_sweeper.OpweaveSweeper", "max_batch_size": None, "params": None},
)
