"""Sweeps through submitit's Slurm executor, on a real Slurm without accounting."""

import signal
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from launched import begun, complete, ended, jobs_of_cells, prepare, shell_of
from slurm_cluster import MISSING, NODES, SlurmCluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"Debian's slurm-wlm and munge are not installed: {', '.join(MISSING)}"),
    pytest.mark.skipif(find_spec("submitit") is None, reason="submitit is not installed: pip install '.[distributed]'"),
]
ASKED = ("hydra/launcher=submitit_slurm", "hydra.launcher.partition=gpu", "system=eager,torchscript", "rounds=1")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return prepare(tmp_path)


@pytest.fixture
def cluster(folder: Path) -> Iterator[SlurmCluster]:
    with tempfile.TemporaryDirectory(prefix="slurm", dir="/tmp") as short:
        cluster = SlurmCluster(Path(short), shell_of(folder))
        try:
            cluster.until_idle()
            yield cluster
        finally:
            cluster.stop()


def test_a_sweep_ends_complete_though_jobs_are_killed(cluster: SlurmCluster, folder: Path) -> None:
    """One is cancelled and one loses its process, while a third waits for a GPU: it is neither lost nor launched again."""
    with begun(folder, cluster.variables, *ASKED, "batch=1,2,3") as process:
        jobs = jobs_of_cells(folder, 2)
        running = [job for job, node in cluster.jobs().items() if node]
        waiting = [job for job, node in cluster.jobs().items() if not node]
        assert len(running) == 2 and len(waiting) == 1
        for job in running:
            text = cluster.output_of("scontrol", "show", "job", job)
            for part in ("Partition=gpu", "TRES=cpu=8,mem=64G,node=1", "TresPerNode=gres:gpu:1", "TimeLimit=04:00:00"):
                assert part in text, text
        assert {jobs[batch].environ()["CUDA_VISIBLE_DEVICES"] for batch in jobs} == {"0"}
        commands = [process.cmdline() for node in NODES for process in cluster.machines[node].processes()]
        assert {"--cpus-per-task=8" in line for line in commands if line[:1] == ["srun"]} == {True}
        cancelled, killed = jobs.values()
        cluster.output_of(
            "scancel", f"{cancelled.environ()['SLURM_ARRAY_JOB_ID']}_{cancelled.environ()['SLURM_ARRAY_TASK_ID']}"
        )
        killed.send_signal(signal.SIGKILL)
        (folder / "wait").unlink()
        out, err = ended(process)
        complete(folder, (1, 2, 3))
        assert "over eager" in out and err.count("done on") == 3
        (again,) = [line for line in err.splitlines() if "launched again" in line]
        assert again.count("custom b") == 2
        assert cluster.jobs() == {}


def test_a_sweep_ends_complete_though_a_node_is_killed(cluster: SlurmCluster, folder: Path) -> None:
    """And though the job of the other has to make way. Slurm puts both in its queue anew."""
    with begun(folder, cluster.variables, *ASKED, "batch=1,2") as process:
        jobs_of_cells(folder, 2)
        jobs = {node: job for job, node in cluster.jobs().items()}
        cluster.kill("n1")
        cluster.output_of("scancel", "--signal=USR2", jobs["n2"])
        cluster.until(lambda: not cluster.jobs()[jobs["n2"]], "the job of n2 waits")
        cluster.boot("n1")
        (folder / "wait").unlink()
        out, err = ended(process)
        complete(folder, (1, 2))
        assert "over eager" in out and err.count("done on") == 2 and "launched again" not in err


def test_an_interrupt_cancels_the_jobs(cluster: SlurmCluster, folder: Path) -> None:
    with begun(folder, cluster.variables, *ASKED, "batch=1,2,3") as process:
        jobs_of_cells(folder, 2)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
        assert process.returncode == 130 and err.splitlines()[-1].startswith("opweave: interrupted"), err
        cluster.until(lambda: cluster.jobs() == {}, "no job is in the queue")


def test_what_slurm_refuses_is_told_in_a_line(cluster: SlurmCluster, folder: Path) -> None:
    with begun(folder, cluster.variables, *ASKED, "hydra.launcher.partition=tpu") as process:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 2 and "invalid partition" in err.splitlines()[-1], err
        assert "Traceback" not in err
