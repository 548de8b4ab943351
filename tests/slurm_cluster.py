"""A real Slurm on this machine: munge, a controller, and nodes of one GPU each, which are processes that can be killed."""

import getpass
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from machines import Machine, free_port, until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo")
SYSTEM_PATH = os.pathsep.join((os.environ["PATH"], "/usr/sbin", "/sbin"))  # where Debian puts daemons
MISSING = [program for program in PROGRAMS if shutil.which(program, path=SYSTEM_PATH) is None]
NODES = ("n1", "n2")

CONF = """
ClusterName=opweave
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge,cred_expire=10
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
KillWait=2
MinJobAge=2
GresTypes=gpu
PartitionName=gpu Nodes={nodes} Default=YES MaxTime=INFINITE State=UP
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=8 RealMemory=65536 Gres=gpu:1\n"
GPU = "NodeName={name} Name=gpu File=/dev/tty{number}\n"  # a device that every machine has


class SlurmCluster:
    """A Slurm without accounting. Everything that it starts has ended after stop.

    Args:
        folder: an empty one with a short path, for sockets lie in it.
        variables: the environment of its daemons.
    """

    def __init__(self, folder: Path, variables: Mapping[str, str]):
        self.folder = folder
        self.variables = {**variables, "PATH": SYSTEM_PATH, "SLURM_CONF": str(folder / "slurm.conf")}
        host = socket.gethostname().partition(".")[0]
        text = CONF.format(host=host, port=free_port(), folder=folder, user=getpass.getuser(), nodes=",".join(NODES))
        text += "".join(NODE.format(name=name, host=host, port=free_port()) for name in NODES)
        (folder / "slurm.conf").write_text(text)
        (folder / "gres.conf").write_text("".join(GPU.format(name=name, number=n) for n, name in enumerate(NODES)))
        for name in ("state", *NODES):
            (folder / name).mkdir()
        key = folder / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        self.machines = {"controller": self._machine("controller", self._munged(), "slurmctld -D")}
        for name in NODES:
            self.boot(name)

    def _munged(self) -> str:
        files = {"key-file": "key", "socket": "munge", "pid-file": "munge.pid", "log-file": "munge.log", "seed-file": "seed"}
        options = [f"--{option}={self.folder / file}" for option, file in files.items()]
        return " ".join(["munged --foreground --force", *options])

    def _machine(self, name: str, *commands: str) -> Machine:
        return Machine(*commands, variables=self.variables, log=self.folder / f"{name}.out")

    def boot(self, name: str) -> None:
        """Start a node, for the first time or after it was killed."""
        self.machines[name] = self._machine(name, f"slurmd -D -N {name}")

    def kill(self, name: str) -> None:
        """Kill a node with everything that runs on it."""
        self.machines[name].kill()

    def output_of(self, *command: str) -> str:
        """What one of Slurm's commands prints."""
        done = subprocess.run(command, env=self.variables, capture_output=True, text=True, timeout=30)
        return done.stdout.strip()

    def jobs(self) -> dict[str, str]:
        """The node of each job that is in the queue, empty while it waits."""
        lines = self.output_of("squeue", "--array", "--noheader", "--format=%i %N").splitlines()
        return {line.split()[0]: line.partition(" ")[2].strip() for line in lines}

    def until_idle(self) -> None:
        """Wait until all nodes are ready."""
        self.until(
            lambda: self.output_of("sinfo", "--noheader", "--format=%D %t") == f"{len(NODES)} idle", "all nodes are idle"
        )

    def until(self, is_so: Callable[[], bool], what: str) -> None:
        """Wait. Raises AssertionError with what the daemons have told."""
        until(is_so, what, self.folder.glob("*.out"))

    def stop(self) -> None:
        for machine in self.machines.values():
            machine.kill()
