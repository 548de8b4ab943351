"""The sweeper (Hydra takes plugins from this package alone): all cells at once, so that those to be compared are measured
in turn."""

from importlib.util import find_spec
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from omegaconf import DictConfig

# The module and the package that a launcher needs, by how its name begins.
NEEDED = {"ray": ("ray", "ray"), "submitit": ("hydra_plugins.hydra_submitit_launcher", "hydra-submitit-launcher")}
HERE = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"  # Hydra's default: cells run in the caller's process


class OpweaveSweeper(BasicSweeper):
    """The cells of a sweep are those of Hydra's own; they are composed and checked here and run by the caller.

    With hydra/launcher=... the caller gets a Launch instead, which has each group of cells run where the launcher says.
    """

    def setup(self, *, hydra_context: Any, task_function: Any, config: DictConfig) -> None:
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config

    def sweep(self, arguments: list[str]) -> None:
        """Hand every cell to the task, once all of them are known to be right. Raises BadRequest."""
        from runners.request.requests import resolve
        from runners.sweep.launch import check

        assert self.hydra_context is not None and self.config is not None
        elsewhere = self.config.hydra.launcher._target_ != HERE
        loader = self.hydra_context.config_loader
        overrides = OverridesParser.create(config_loader=loader).parse_overrides([*self._parse_config(), *arguments])
        cells = [tuple(cell) for cell in self.split_arguments(overrides, None)[0]]
        # A wrong value is wrong wherever it stands: the cells that bring a new one come first, so that it is told soon.
        known: set[str] = set()
        bring_new = [cell for cell in cells if not known.issuperset(cell) and not known.update(cell)]
        composed = {}
        for cell in dict.fromkeys([*bring_new, *cells]):
            composed[cell] = loader.load_sweep_config(self.config, list(cell))
            (check if elsewhere else resolve)(composed[cell])
        if elsewhere:
            self.task_function(self.launch([(cell, composed[cell]) for cell in cells]))
            return
        for cell in cells:
            self.task_function(composed[cell])

    def launch(self, cells: list[tuple[tuple[str, ...], DictConfig]]) -> Any:
        """What runs these cells through the launcher that was asked for. Raises BadRequest."""
        from runners.request.bad_request import BadRequest
        from runners.sweep.launch import Launch, grouped, meeting_place

        assert self.hydra_context is not None and self.config is not None
        groups = grouped(cells)
        folder = meeting_place(groups, self.config)  # before the launcher is made, which asks for it
        name = self.config.hydra.runtime.choices["hydra/launcher"]
        module, package = NEEDED.get(name.partition("_")[0], ("hydra", "hydra-core"))
        if find_spec(module) is None:
            raise BadRequest(f"hydra/launcher={name} needs {package}: pip install 'opweave[distributed]'")
        launcher = Plugins.instance().instantiate_launcher(
            hydra_context=self.hydra_context, task_function=self.task_function, config=self.config
        )
        return Launch(launcher, self.hydra_context, self.config, name, groups, folder)


ConfigStore.instance().store(
    group="hydra/sweeper",
    name="opweave",
    node={"_target_": "hydra_plugins.opweave_sweeper.OpweaveSweeper", "max_batch_size": None, "params": None},
)
