"""The launcher of sweeps: all cells at once, so that those to be compared are measured in turn."""

import sys
from collections.abc import Sequence
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from omegaconf import DictConfig


class OpweaveLauncher(Launcher):
    """Composes every cell before the first one runs: a bad one ends the sweep with nothing measured."""

    def setup(self, *, hydra_context: Any, task_function: Any, config: DictConfig) -> None:
        self.hydra_context, self.config = hydra_context, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from runners.requests import execute

        loader = self.hydra_context.config_loader
        cells = [loader.load_sweep_config(self.config, list(overrides)) for overrides in job_overrides]
        sys.exit(execute(cells))


ConfigStore.instance().store(
    group="hydra/launcher", name="opweave", node={"_target_": "hydra_plugins.opweave_launcher.OpweaveLauncher"}
)
