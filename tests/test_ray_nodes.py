"""Sweeps on a Ray of two nodes, of one GPU each: two sets of Ray's processes on this machine."""

import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from launched import begun, complete, ended, jobs_of_cells, prepare, shell_of
from machines import Machine, free_port, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: pip install '.[distributed]'"),
]
START = (
    f"{sys.executable} -m ray.scripts.scripts start --block --num-gpus=1 --num-cpus=2",
    "--min-worker-port=0 --max-worker-port=0 --dashboard-agent-listen-port=0 --disable-usage-stats",
)  # random ports, since the nodes share an address
HEALTH = {"RAY_health_check_period_ms": "1000", "RAY_health_check_failure_threshold": "3"}


@dataclass(frozen=True)
class RayCluster:
    """The first of the nodes is the head, without which there is no Ray."""

    nodes: tuple[Machine, Machine]
    address: str
    variables: dict[str, str]

    def place(self, process: psutil.Process) -> int:
        """The number of the node that a process runs on."""
        (number,) = (number for number, node in enumerate(self.nodes) if process in node.processes())
        return number


def has_started(log: Path) -> bool:
    return "Ray runtime started" in log.read_text()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return prepare(tmp_path)


@pytest.fixture
def cluster(folder: Path) -> Iterator[RayCluster]:
    variables = shell_of(folder, RAY_AUTH_MODE="disabled")
    address = f"127.0.0.1:{free_port()}"
    with ExitStack() as stack:
        nodes = []
        for gpu, options in enumerate(
            (f"--head --port={address.partition(':')[2]} --include-dashboard=false", f"--address={address}")
        ):
            short = stack.enter_context(tempfile.TemporaryDirectory(prefix="ray", dir="/tmp"))  # for sockets
            log = Path(short) / "out"
            place = f" --temp-dir={short}" if "--head" in options else ""
            nodes.append(
                Machine(
                    " ".join((*START, options)) + place,
                    variables={**variables, **HEALTH, "CUDA_VISIBLE_DEVICES": str(gpu)},
                    log=log,
                )
            )
            stack.callback(nodes[-1].kill)
            until(partial(has_started, log), "the node has started", [log])
        yield RayCluster((nodes[0], nodes[1]), address, variables)


def launcher_arguments(cluster: RayCluster) -> tuple[str, ...]:
    return "hydra/launcher=ray", f"hydra.launcher.init.address={cluster.address}", "system=eager,torchscript", "rounds=1"


def test_a_sweep_ends_complete_though_a_node_is_killed(cluster: RayCluster, folder: Path) -> None:
    """And though the other's worker is killed too. Ray starts both anew, on the node that is left."""
    with begun(folder, cluster.variables, *launcher_arguments(cluster), "batch=1,2") as process:
        workers = {cluster.place(worker): worker for worker in jobs_of_cells(folder, 2).values()}
        assert set(workers) == {0, 1}
        assert [workers[node].environ()["CUDA_VISIBLE_DEVICES"] for node in (0, 1)] == ["0", "1"]
        cluster.nodes[1].kill()
        workers[0].send_signal(signal.SIGKILL)
        (folder / "wait").unlink()
        out, err = ended(process)
        complete(folder, (1, 2))
        assert "over eager" in out and err.count("done on") == 2 and "launched again" not in err


def test_only_the_job_that_ray_gives_up_is_launched_again(cluster: RayCluster, folder: Path) -> None:
    with begun(
        folder, cluster.variables, *launcher_arguments(cluster), "hydra.launcher.remote.max_retries=0", "batch=1,2,3"
    ) as process:
        batch, worker = next(iter(jobs_of_cells(folder, 2).items()))
        worker.send_signal(signal.SIGKILL)
        (folder / "wait").unlink()
        _, err = ended(process)
        complete(folder, (1, 2, 3))
        (again,) = [line for line in err.splitlines() if "launched again" in line]
        assert again.endswith(f": custom b{batch}")
