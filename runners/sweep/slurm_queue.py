"""Which jobs a Slurm cluster still has in its queue, for submitit, which asks for more: what only accounting keeps."""

from submitit.slurm.slurm import SlurmInfoWatcher

QUEUE = ["squeue", "--me", "--array", "--noheader", "--format=%i"]  # the ids of jobs that wait, run or end
MOST_S = 30  # seconds between two looks at the queue


class QueueWatcher(SlurmInfoWatcher):
    """The states of submitted jobs. Every Slurm answers squeue; sacct needs accounting, which many clusters do not have.

    A job that is put in the queue anew does not leave it in between, so one that is not in it has ended.
    """

    def __init__(self) -> None:
        super().__init__(delay_s=MOST_S)

    def _make_command(self) -> list[str] | None:
        return QUEUE if self._registered - self._finished else None

    def read_info(self, string: bytes | str) -> dict[str, dict[str, str]]:
        """The state of each job.

        Args:
            string: what QUEUE prints.

        Returns:
            By the job's id, its `State`: RUNNING while it is in the queue, ENDED from then on.
        """
        queued = set((string if isinstance(string, str) else string.decode()).split())
        return {job: {"State": "RUNNING" if job in queued else "ENDED"} for job in self._registered}
