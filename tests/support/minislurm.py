"""Minislurm: a real Slurm of several nodes on one machine, by Debian's packages: munged, slurmctld, a slurmd per node.

All is in one folder; no systemd, no cgroups, no root. Pretended GPUs are links to /dev/null. It differs from a site's:
no slurmdbd, one host address, far shorter timeouts.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

SBIN = ":/usr/sbin:/usr/local/sbin:/sbin"
MARKER = ".minislurm"  # start() empties only directories that carry it
PROC = Path("/proc")
# Plugins of the kind */none are left unset: newer versions no longer know them.
# TreeWidth: with a small tree a dead node makes its tree mates look dead, too.
# SchedulerParameters: no word may contain "defer", it would switch on deferred scheduling.
COMMON = """\
ClusterName=mini
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={b}/run/munge.socket
StateSaveLocation={b}/state
SlurmdSpoolDir={b}/spool/%n
SlurmctldPidFile={b}/run/slurmctld.pid
SlurmdPidFile={b}/run/slurmd-%n.pid
SlurmctldLogFile={b}/log/slurmctld.log
SlurmdLogFile={b}/log/slurmd-%n.log
SlurmctldDebug=debug
SlurmdDebug=debug
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0,permit_job_expansion
PriorityType=priority/multifactor
PriorityWeightPartition=1000
PriorityWeightQOS=1000
PriorityWeightAge=10
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=1
SlurmdTimeout={timeout}
SlurmctldTimeout=10
TreeWidth=65533
InactiveLimit=0
KillWait=2
MinJobAge=300
MaxNodeCount=64
GresTypes=gpu
SlurmdParameters=config_overrides
RebootProgram=/bin/true
"""
PARTITIONS = """\
PartitionName=train Nodes={nodes} Default=YES State=UP PriorityTier=100 PreemptMode=off OverSubscribe=no
PartitionName=low Nodes={nodes} State=UP PriorityTier=1 PreemptMode=requeue GraceTime=0 OverSubscribe=no
"""


def find(name: str) -> str:
    path = shutil.which(name, path=os.environ.get("PATH", "") + SBIN)
    if path is None:
        raise FileNotFoundError(f"{name} is not installed: apt-get install slurmctld slurmd slurm-client munge")
    return path


def available() -> bool:
    """Whether everything is installed that start() needs."""
    with contextlib.suppress(FileNotFoundError):
        return all(find(name) for name in ("slurmctld", "slurmd", "munged", "sinfo"))
    return False


def version() -> tuple[int, int]:
    out = subprocess.run([find("slurmd"), "-V"], text=True, capture_output=True, check=True).stdout
    major, minor = out.split()[1].split(".")[:2]
    return int(major), int(minor)


def free_ports(n: int) -> list[int]:
    socks = [socket.create_server(("127.0.0.1", 0)) for _ in range(n)]
    ports = [s.getsockname()[1] for s in socks]
    for s in socks:
        s.close()
    return ports


def stat_fields(pid: int) -> tuple[str, str, int]:
    """(command, state, parent pid) of a process."""
    head, tail = (PROC / str(pid) / "stat").read_text().rsplit(")", 1)
    state, parent = tail.split()[:2]
    return head.split("(", 1)[1], state, int(parent)


def send(sig: signal.Signals, pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, sig)


@dataclass
class MiniSlurm:
    base: Path | None = None  # None: a temporary directory, removed by stop()
    nodes: int = 6
    gpus: int = 2  # pretended GPUs per node; CUDA_VISIBLE_DEVICES is set for real
    cpus: int = 4
    spare_nodes: int = 0  # the last k nodes get the feature "spare", the others "prod"
    slurmd_timeout: int = 5  # seconds; Slurm's own default is 300
    extra_conf: str = ""
    partitions: str | None = None
    bindir: str | None = None  # another Slurm's commands
    procs: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _tmp: bool = False

    # ---- configuration ----------------------------------------------------
    @property
    def root(self) -> Path:
        assert self.base is not None, "write_conf() chooses the base directory"
        return self.base

    @property
    def conf(self) -> Path:
        return self.root / "etc" / "slurm.conf"

    def node_names(self) -> list[str]:
        return [f"n{i}" for i in range(1, self.nodes + 1)]

    def write_conf(self) -> None:
        if self.base is None:
            self.base = Path(tempfile.mkdtemp(prefix="minislurm-"))
            self._tmp = True
        self.base = b = Path(self.base).absolute()
        for d in ("etc", "log", "run", "state", "spool", "dev"):
            (b / d).mkdir(parents=True, exist_ok=True)
        (b / MARKER).touch()
        b.chmod(0o755)
        key = b / "etc" / "munge.key"
        if not key.exists():
            key.write_bytes(secrets.token_bytes(128))
            key.chmod(0o400)
        # CgroupPlugin=disabled exists from 23.02 on; before, autodetect does no harm without a task plugin.
        (b / "etc" / "cgroup.conf").write_text(
            "CgroupPlugin=disabled\n" if version() >= (23, 2) else "CgroupPlugin=autodetect\n"
        )
        self._write_gres()
        self._write_slurm_conf()

    def _write_gres(self) -> None:
        # gres/gpu wants File= to name a device node; a link to /dev/null is one, and needs no root.
        lines = ["AutoDetect=off"]
        for n in self.node_names():
            for g in range(self.gpus):
                dev = self.root / "dev" / n / f"nvidia{g}"
                dev.parent.mkdir(exist_ok=True)
                if not dev.is_symlink():
                    dev.symlink_to("/dev/null")
                lines.append(f"NodeName={n} Name=gpu Flags=nvidia_gpu_env File={dev}")
        (self.root / "etc" / "gres.conf").write_text("\n".join(lines) + "\n")

    def _write_slurm_conf(self) -> None:
        host = socket.gethostname().split(".")[0]
        first, *ports = free_ports(1 + self.nodes)
        parts = [
            COMMON.format(b=self.root, host=host, port=first, user=getpass.getuser(), timeout=self.slurmd_timeout),
            self.extra_conf,
            *(self._node(name, host, port) for name, port in zip(self.node_names(), ports, strict=True)),
            self.partitions or PARTITIONS.format(nodes=",".join(self.node_names())),
        ]
        self.conf.write_text("\n".join(parts) + "\n")

    def _node(self, name: str, host: str, port: int) -> str:
        gres = f"Gres=gpu:{self.gpus} " if self.gpus else ""
        is_spare = name in self.node_names()[self.nodes - self.spare_nodes :]
        return (
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} "
            f"CPUs={self.cpus} Boards=1 SocketsPerBoard=1 CoresPerSocket={self.cpus} ThreadsPerCore=1 "
            f"RealMemory=1000 {gres}Feature={'spare' if is_spare else 'prod'} State=UNKNOWN"
        )

    # ---- processes --------------------------------------------------------
    @property
    def env(self) -> dict[str, str]:
        e = dict(os.environ, SLURM_CONF=str(self.conf))
        if self.bindir:
            e["PATH"] = self.bindir + ":" + e.get("PATH", "")
        return e

    def _spawn(self, name: str, *argv: str) -> None:
        with (self.root / "log" / f"{name}.out").open("ab") as log:
            p = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.env, start_new_session=True, cwd="/"
            )
        self.procs[name] = p
        (self.root / "run" / f"{name}.mypid").write_text(str(p.pid))

    def start_node(self, n: str) -> None:
        self._spawn(f"slurmd-{n}", find("slurmd"), "-D", "-N", n, "-f", str(self.conf))

    revive_node = start_node

    def start(self, timeout: float = 20) -> Self:
        """Start everything; return when all nodes are idle."""
        self.write_conf()
        b = self.root
        if self._pids():
            raise RuntimeError(f"a cluster is still running in {b}: stop it first")
        self._spawn(
            "munged",
            find("munged"),
            "-F",
            "--force",
            f"--key-file={b}/etc/munge.key",
            f"--socket={b}/run/munge.socket",
            f"--pid-file={b}/run/munged.pid",
            f"--log-file={b}/log/munged.log",
            f"--seed-file={b}/run/munged.seed",
        )
        self.wait(lambda: (b / "run" / "munge.socket").exists(), 5, "munge socket")
        self._spawn("slurmctld", find("slurmctld"), "-D", "-c", "-f", str(self.conf))
        for n in self.node_names():
            self.start_node(n)
        self.wait(self._all_idle, timeout, "all nodes idle")
        return self

    def _all_idle(self) -> bool:
        r = self.run("sinfo", "-h", "-N", "-o", "%N %T", check=False)
        states = dict(line.split() for line in r.stdout.splitlines() if line.strip())
        return r.returncode == 0 and len(states) == self.nodes and set(states.values()) == {"idle"}

    @staticmethod
    def wait(fact: Callable[[], bool], timeout: float, what: str) -> None:
        """Wait for a fact, not for a time."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            with contextlib.suppress(subprocess.SubprocessError, ValueError):
                if fact():
                    return
            time.sleep(0.05)
        raise TimeoutError(f"minislurm: {what} not reached in {timeout} s")

    def _ours(self, pid: int) -> bool:
        """Alive, and started with this cluster's configuration (a recorded pid may have been given to another)."""
        with contextlib.suppress(OSError, IndexError):
            mark = f"SLURM_CONF={self.conf}".encode()
            return stat_fields(pid)[1] != "Z" and mark in (PROC / str(pid) / "environ").read_bytes().split(b"\0")
        return False

    def _pids(self) -> dict[str, int]:
        recorded = {f.stem: int(f.read_text()) for f in (self.root / "run").glob("*.mypid")}
        return {name: pid for name, pid in recorded.items() if self._ours(pid)}

    def alive(self, n: str) -> bool:
        """Whether the slurmd of node n runs."""
        return f"slurmd-{n}" in self._pids()

    def stop(self) -> None:
        """End what start() began, by pid, then left-over slurmstepds of this cluster by theirs."""
        self._cancel_jobs()
        pids = self._pids()
        order = sorted(pids, key=lambda name: (name == "munged", name == "slurmctld"))
        stepds = [pid for pid in self._all_pids() if self._is_stepd(pid) and self._ours(pid)]
        for name in order:
            send(signal.SIGCONT, pids[name])  # a frozen node would never see the next signal
        for sig in (signal.SIGTERM, signal.SIGKILL):
            for name in order:
                if self._ours(pids[name]):
                    send(sig, pids[name])
            end = time.monotonic() + 3
            while time.monotonic() < end and any(self._ours(pids[name]) for name in order):
                for p in self.procs.values():
                    p.poll()
                time.sleep(0.05)
        for pid in stepds:
            if self._ours(pid):
                send(signal.SIGKILL, pid)
        for p in self.procs.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                p.wait(1)
        if self._tmp:
            shutil.rmtree(self.root, ignore_errors=True)

    def _cancel_jobs(self) -> None:
        if "slurmctld" not in self._pids():
            return
        with contextlib.suppress(subprocess.SubprocessError):
            self.run("scancel", "-f", "-u", getpass.getuser(), check=False, timeout=5)
            for _ in range(20):
                r = self.run("squeue", "-h", "-t", "R,CG", check=False, timeout=3)
                if r.returncode or not r.stdout.strip():
                    return
                time.sleep(0.1)

    @staticmethod
    def _all_pids() -> Iterator[int]:
        return (int(d.name) for d in PROC.iterdir() if d.name.isdigit())

    @staticmethod
    def _is_stepd(pid: int) -> bool:
        with contextlib.suppress(OSError):
            return b"slurmstepd" in (PROC / str(pid) / "cmdline").read_bytes()
        return False

    # ---- faults -----------------------------------------------------------
    def node_pids(self, n: str) -> list[int]:
        """The slurmd of node n, every slurmstepd it runs, and all their descendants."""
        slurmd = self._pids().get(f"slurmd-{n}")
        spool = f"{self.root}/spool/{n}".encode()
        stepds = [pid for pid in self._all_pids() if self._is_stepd(pid) and spool in self._open_names(pid)]
        children: dict[int, list[int]] = {}
        for pid in self._all_pids():
            with contextlib.suppress(OSError, IndexError):
                children.setdefault(stat_fields(pid)[2], []).append(pid)
        found, todo = [p for p in (slurmd, *stepds) if p is not None], list(stepds)
        while todo:
            below = children.get(todo.pop(), [])
            found += below
            todo += below
        return found

    @staticmethod
    def _open_names(pid: int) -> bytes:
        """Names of the files and unix sockets a process holds; slurmstepd listens in its node's spool directory."""
        inodes, names = set(), b""
        with contextlib.suppress(OSError):
            for f in (PROC / str(pid) / "fd").iterdir():
                with contextlib.suppress(OSError):
                    target = os.readlink(f)
                    names += target.encode() + b"\n"
                    if target.startswith("socket:["):
                        inodes.add(target[8:-1])
        for line in (PROC / "net/unix").read_text().splitlines()[1:]:
            p = line.split()
            if len(p) == 8 and p[6] in inodes:
                names += p[7].encode() + b"\n"
        return names

    def kill_node(self, n: str) -> None:
        """A power cut: slurmd, its slurmstepds and all tasks get SIGKILL, in an order that leaves nobody to tell."""

        def rank(pid: int) -> int:
            with contextlib.suppress(OSError, IndexError):
                command, _, parent = stat_fields(pid)
                if command == "srun":
                    # Why first: srun's shepherd child cancels the whole step when its parent dies.
                    return 0 if stat_fields(parent)[0] == "srun" else 1
                return 2 if "slurm" in command else 3
            return 3

        for pid in sorted(self.node_pids(n), key=rank):
            send(signal.SIGKILL, pid)

    def freeze_node(self, n: str) -> None:
        """A node that answers no more but is not gone."""
        for pid in self.node_pids(n):
            send(signal.SIGSTOP, pid)

    def thaw_node(self, n: str) -> None:
        for pid in self.node_pids(n):
            send(signal.SIGCONT, pid)

    # ---- use --------------------------------------------------------------
    def run(self, *argv: str, check: bool = True, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        return subprocess.run(argv, env=self.env, check=check, timeout=timeout, text=True, capture_output=True)

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.stop()
            raise

    def __exit__(self, *exc: object) -> None:
        self.stop()
