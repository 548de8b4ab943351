"""The sweeper (Hydra takes plugins from this package alone): all cells at once, so that those to be compared are measured
in turn."""

from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig


class OpweaveSweeper(BasicSweeper):
    """The cells of a sweep are those of Hydra's own; they are composed and checked here and run by the caller."""

    def setup(self, *, hydra_context: Any, task_function: Any, config: DictConfig) -> None:
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config

    def sweep(self, arguments: list[str]) -> None:
        """Hand every cell to the task, once all of them are known to be right. Raises BadRequest."""
        from runners.requests import resolve

        assert self.hydra_context is not None and self.config is not None
        loader = self.hydra_context.config_loader
        overrides = OverridesParser.create(config_loader=loader).parse_overrides([*self._parse_config(), *arguments])
        cells = [tuple(cell) for cell in self.split_arguments(overrides, None)[0]]
        # A wrong value is wrong wherever it stands: the cells that bring a new one come first, so that it is told soon.
        known: set[str] = set()
        bring_new = [cell for cell in cells if not known.issuperset(cell) and not known.update(cell)]
        composed = {}
        for cell in dict.fromkeys([*bring_new, *cells]):
            composed[cell] = loader.load_sweep_config(self.config, list(cell))
            resolve(composed[cell])
        for cell in cells:
            self.task_function(composed[cell])


ConfigStore.instance().store(
    group="hydra/sweeper",
    name="opweave",
    node={"_target_": "hydra_plugins.opweave_sweeper.OpweaveSweeper", "max_batch_size": None, "params": None},
)
