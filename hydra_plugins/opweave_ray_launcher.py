"""The launcher behind hydra/launcher=ray: each job is a task of Ray's.

Hydra's own plugin for Ray pins cloudpickle to a version that TVM's tuning cannot do with, and brings what AWS needs.
"""

from collections.abc import Sequence

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, configure_log, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict


class OpweaveRayLauncher(Launcher):
    """Jobs as tasks of a Ray that runs, or that is started for them.

    Args:
        init: arguments of ray.init, which is called unless Ray runs in this process.
        remote: arguments of ray.remote: what a job asks for, and how often a lost one is started again.
    """

    def __init__(self, init: DictConfig, remote: DictConfig):
        self.init, self.remote = init, remote

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Returns once all jobs have ended. Raises RayError where one is lost for good, whatever the others do."""
        import ray  # Hydra imports every plugin at its start; this one takes seconds

        setup_globals()
        configure_log(self.config.hydra.hydra_logging, self.config.hydra.verbose)
        if not ray.is_initialized():
            ray.init(**_plain(self.init))
        task = ray.remote(**_plain(self.remote))(_run)
        jobs = []
        for number, overrides in enumerate(job_overrides, initial_job_idx):
            config = self.hydra_context.config_loader.load_sweep_config(self.config, list(overrides))
            with open_dict(config):
                config.hydra.job.id, config.hydra.job.num = f"ray_{number}", number
            jobs.append(task.remote(self.hydra_context, self.task_function, config, Singleton.get_state()))
        return list(ray.get(jobs))


def _run(context: HydraContext, task_function: TaskFunction, config: DictConfig, singletons: object) -> JobReturn:
    """In the process of a job, which knows nothing yet of what Hydra has set up in the caller's."""
    setup_globals()
    Singleton.set_state(singletons)
    return run_job(
        hydra_context=context,
        task_function=task_function,
        config=config,
        job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
    )


def _plain(options: DictConfig) -> dict[str, object]:
    """Keyword arguments from a config."""
    container = OmegaConf.to_container(options, resolve=True)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}
