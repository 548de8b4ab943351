"""The launchers behind hydra/launcher: each job is a task of Ray's, or a job of submitit's on Slurm or on this machine.

Hydra's own plugins do not serve. The one for Ray pins cloudpickle to a version that TVM's tuning cannot do with, and brings
what AWS needs. The one for submitit gives up all jobs with the first that is lost, and asks sacct, which needs accounting.
"""

from __future__ import annotations

import signal
import sys
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, configure_log, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

if TYPE_CHECKING:  # Hydra imports every plugin at its start; Ray and submitit may not be there, and take seconds
    from submitit import AutoExecutor
    from submitit.helpers import DelayedSubmission


class Job:
    """A job as it goes to a node, pickled."""

    def __init__(self, context: HydraContext, task_function: TaskFunction, config: DictConfig):
        self.context, self.task_function, self.config = context, task_function, config
        self.singletons = Singleton.get_state()

    def __call__(self) -> JobReturn:
        """Run it, in a process that knows nothing yet of what Hydra has set up in the caller's."""
        setup_globals()
        Singleton.set_state(self.singletons)
        return run_job(
            hydra_context=self.context,
            task_function=self.task_function,
            config=self.config,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )


class SubmititJob:
    """A job under submitit."""

    def __init__(self, job: Job):
        self.job = job

    def __call__(self) -> JobReturn:
        """Run it, to its end or Slurm's."""
        # Slurm tells each process of a job to end. With submitit's handler this one goes on, as if its cells had failed.
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        return self.job()

    def checkpoint(self) -> DelayedSubmission:
        """What goes to the queue anew where a job runs out of time: the same, which goes on where it stopped."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


class OpweaveLauncher(Launcher):
    """What the launchers share: a launch makes Jobs, hands them over, and returns once all of them have ended."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Returns once all jobs have ended. Raises what the launcher raises for the first that is lost."""
        setup_globals()
        configure_log(self.config.hydra.hydra_logging, self.config.hydra.verbose)
        jobs = []
        for number, overrides in enumerate(job_overrides, initial_job_idx):
            config = self.hydra_context.config_loader.load_sweep_config(self.config, list(overrides))
            with open_dict(config):
                config.hydra.job.id, config.hydra.job.num = str(number), number
            jobs.append(Job(self.hydra_context, self.task_function, config))
        return self.run(jobs)

    @abstractmethod
    def run(self, jobs: Sequence[Job]) -> Sequence[JobReturn]:
        """Hand the jobs over; returns once all of them have ended."""


class RayLauncher(OpweaveLauncher):
    """Jobs as tasks of a Ray that runs, or that is started for them.

    Args:
        init: arguments of ray.init, which is called unless Ray runs in this process.
        remote: arguments of ray.remote: what a job asks for, and how often a lost one is started again.
    """

    def __init__(self, init: DictConfig, remote: DictConfig):
        self.init, self.remote = _plain(init), _plain(remote)

    def run(self, jobs: Sequence[Job]) -> Sequence[JobReturn]:
        import ray

        if not ray.is_initialized():
            ray.init(**self.init)
        task = ray.remote(**self.remote)(_run)
        tasks = [task.remote(job) for job in jobs]
        ray.wait(tasks, num_returns=len(tasks))  # ray.get raises with the first that is lost, whatever the others do
        return list(ray.get(tasks))


class SubmititLauncher(OpweaveLauncher):
    """Jobs as submitit's. An interrupt cancels them.

    Args:
        submitit_folder: where submitit leaves a job and its answer; %j stands for the job.
        parameters: of submitit's executor: what a job asks for.
    """

    cluster: str  # submitit's name of the executor

    def __init__(self, submitit_folder: str, **parameters: Any):
        self.folder, self.parameters = submitit_folder, _plain(OmegaConf.create(parameters))

    def run(self, jobs: Sequence[Job]) -> Sequence[JobReturn]:
        submitted = self.executor().submit_array([SubmititJob(job) for job in jobs])
        try:
            for job in submitted:
                job.wait()
        except KeyboardInterrupt:
            for job in submitted:
                job.cancel(check=False)
            raise
        return [job.result() for job in submitted]

    def executor(self, **options: Any) -> AutoExecutor:
        """A new one of submitit's.

        Args:
            options: of its making, beside the folder.
        """
        from submitit import AutoExecutor

        executor = AutoExecutor(self.folder, cluster=self.cluster, **self._named(options))
        executor.update_parameters(**self._named(self.parameters))
        return executor

    def _named(self, options: dict[str, Any]) -> dict[str, Any]:
        """Options by the names that AutoExecutor has for them."""
        return {f"{self.cluster}_{name}": value for name, value in options.items()}


class LocalLauncher(SubmititLauncher):
    """Jobs as processes of this machine."""

    cluster = "local"


class SlurmLauncher(SubmititLauncher):
    """Jobs of a Slurm cluster, with or without accounting.

    Args:
        max_num_timeout: how often a job that runs out of time is put in the queue anew.
        cpus_per_task: cores of a job, None for what the cluster gives.
    """

    cluster = "slurm"

    def __init__(self, max_num_timeout: int, cpus_per_task: int | None, **parameters: Any):
        # Since Slurm 22.05 srun does not take the number of cores from sbatch; unless told, it binds a job to one.
        srun_args = [] if cpus_per_task is None else [f"--cpus-per-task={cpus_per_task}"]
        super().__init__(**{"cpus_per_task": cpus_per_task, "srun_args": srun_args, **parameters})
        self.max_num_timeout = max_num_timeout

    def executor(self, **options: Any) -> AutoExecutor:
        from submitit import SlurmJob

        from runners.sweep.slurm_queue import QueueWatcher

        SlurmJob.watcher = QueueWatcher()  # all jobs of a process share one
        return super().executor(max_num_timeout=self.max_num_timeout, **options)


def _run(job: Job) -> JobReturn:
    return job()


def _plain(options: DictConfig) -> dict[str, Any]:
    """Keyword arguments from a config."""
    container = OmegaConf.to_container(options, resolve=True)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}
