"""A real Slurm of three nodes on this machine, started and stopped by tests."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import psutil
from conftest import wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "squeue", "sinfo")
NODES = ("n1", "n2", "n3")

_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge/munge.socket
CredType=cred/munge
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SlurmdParameters=config_overrides
MpiDefault=none
JobRequeue=0
ReturnToService=2
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
KillWait=2
"""


def missing() -> str | None:
    """Say what keeps Slurm from running here, if anything does."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"Slurm is not installed ({', '.join(absent)} missing): make test-slurm says how"
    if os.geteuid() != 0:
        return "Slurm's daemons run jobs of all users, so its tests need root"
    return None


class Slurm:
    """One controller and three nodes; ``conf`` is what ``SLURM_CONF`` names."""

    def __init__(self) -> None:
        # munge refuses long socket paths and directories that a group can write to.
        self.root = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.root.chmod(0o755)
        self.conf = self.root / "slurm.conf"

    def start(self) -> None:
        """Start all daemons, and wait until every node is idle."""
        host = socket.gethostname().split(".")[0]
        munge = self.root / "munge"
        for directory in (munge, self.root / "state", self.root / "log"):
            directory.mkdir(mode=0o755)
        for node in NODES:
            (self.root / "spool" / node).mkdir(mode=0o755, parents=True)
        key = munge / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        ports = _free_ports(1 + len(NODES))
        nodes = [
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 "
            "RealMemory=4000 State=UNKNOWN\n"
            for node, port in zip(NODES, ports[1:], strict=True)
        ]
        partition = f"PartitionName=debug Nodes={','.join(NODES)} Default=YES State=UP\n"
        head = _CONF.format(host=host, port=ports[0], root=self.root)
        self.conf.write_text(head + "".join(nodes) + partition)
        os.environ["SLURM_CONF"] = str(self.conf)
        _run(
            ["munged", f"--key-file={key}", f"--socket={munge}/munge.socket"]
            + [f"--{name}-file={munge}/munged.{name}" for name in ("pid", "log", "seed")]
        )
        _run(["slurmctld", "-f", str(self.conf)])
        for node in NODES:
            _run(["slurmd", "-f", str(self.conf), "-N", node])
        assert wait_until(self._all_idle, 30), self.logs()

    def _all_idle(self) -> bool:
        done = subprocess.run(["sinfo", "-h", "-N", "-o", "%T"], capture_output=True, text=True)
        return done.stdout.split() == ["idle"] * len(NODES)

    def jobs(self) -> dict[str, tuple[str, str]]:
        """Return the state and the node of every job that has not ended."""
        lines = _run(["squeue", "-h", "-o", "%i %T %N"]).splitlines()
        return {
            job: (state, node[0] if node else "") for job, state, *node in map(str.split, lines)
        }

    def cancel(self, job: str) -> None:
        """End a job."""
        _run(["scancel", job])

    def clear(self) -> bool:
        """End all jobs, and return whether they were gone in time."""
        _run(["scancel", "-u", getpass.getuser()])
        return wait_until(lambda: not self.jobs(), 30)

    def logs(self) -> str:
        """Return what the daemons have to say."""
        files = sorted((self.root / "log").glob("*.log"))
        return "\n".join(f"{file.name}:\n{file.read_text()}" for file in files)

    def stop(self) -> None:
        """End the jobs and then the daemons, and remove all files."""
        try:
            if self.conf.exists():
                self.clear()
        finally:
            pids = [*self.root.glob("slurmd-*.pid"), self.root / "slurmctld.pid"]
            daemons = [_process(file) for file in (*pids, self.root / "munge" / "munged.pid")]
            for daemon in filter(None, daemons):
                daemon.send_signal(signal.SIGTERM)
            _, alive = psutil.wait_procs(list(filter(None, daemons)), timeout=10)
            for daemon in alive:
                if daemon.status() != psutil.STATUS_ZOMBIE:
                    daemon.kill()
            os.environ.pop("SLURM_CONF", None)
            shutil.rmtree(self.root)


def _process(pid_file: Path) -> psutil.Process | None:
    try:
        return psutil.Process(int(pid_file.read_text()))
    except (OSError, ValueError, psutil.NoSuchProcess):
        return None


def _free_ports(count: int) -> list[int]:
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in servers]
    for server in servers:
        server.close()
    return ports


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout
