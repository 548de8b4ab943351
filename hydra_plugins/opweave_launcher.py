"""The launcher of sweeps (Hydra takes plugins from this package alone): all cells at once, so that those to be compared
are measured in turn."""

from collections.abc import Sequence
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from omegaconf import DictConfig


class OpweaveLauncher(Launcher):
    """Composes every cell and hands them over, before the first one runs: a bad one ends the sweep with nothing measured."""

    def setup(self, *, hydra_context: Any, task_function: Any, config: DictConfig) -> None:
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        loader = self.hydra_context.config_loader
        for cell in [loader.load_sweep_config(self.config, list(overrides)) for overrides in job_overrides]:
            self.task_function(cell)
        return []


ConfigStore.instance().store(
    group="hydra/launcher", name="opweave", node={"_target_": "hydra_plugins.opweave_launcher.OpweaveLauncher"}
)
