"""The configuration of a Slurm for tests."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from tests.support.patience import longer
from tests.support.slurm.needs import find

STATE = "/run/slurm"  # on each machine: gone when its power is
DEVICES = f"{STATE}/dev"


@dataclass(frozen=True)
class Site:
    """What differs between sites. These are the values of one that has little patience, for tests that have less."""

    gpus: int = 0  # pretended ones on each node: `CUDA_VISIBLE_DEVICES` is set, and there is nothing behind it
    cpus: int = 4  # pretended ones as well
    lost_after_s: int = 5  # SlurmdTimeout: a node that has been silent for so long is down
    answer_within_s: int = 2  # MessageTimeout
    kill_wait_s: int = 2  # between SIGTERM and SIGKILL of a job that ends
    grace_s: int = 0  # between the SIGTERM of a preemption and its end
    longest: str = "INFINITE"  # MaxTime of a job, as Slurm writes times
    usual: str = "INFINITE"  # DefaultTime
    returns: int = 1  # ReturnToService: a node that was down because it was silent comes back by itself
    partitions: tuple[str, ...] = ()  # lines in place of `main` and `low`
    more: tuple[str, ...] = ()  # lines at the end

    def partition_lines(self) -> list[str]:
        """`main` takes nodes from `low`, whose jobs then wait in the queue again."""
        if self.partitions:
            return list(self.partitions)
        common = f"Nodes=ALL State=UP MaxTime={self.longest} DefaultTime={self.usual} OverSubscribe=NO"
        return [
            f"PartitionName=main {common} Default=YES PriorityTier=100 PreemptMode=OFF",
            f"PartitionName=low {common} PriorityTier=1 PreemptMode=REQUEUE GraceTime={self.grace_s}",
        ]


# SchedulerParameters: no word may contain "defer", which would put off all that can be done at once.
# TreeWidth: in a deep tree of nodes, the loss of one makes those below it look lost too.
# Nothing here needs cgroups, which the harness's machines have for reading only.
COMMON = """\
ClusterName=tests
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
StateSaveLocation={state}/controller
SlurmdSpoolDir={state}/node
SlurmctldPidFile={state}/slurmctld.pid
SlurmdPidFile={state}/slurmd.pid
SlurmctldDebug=verbose
SlurmdDebug=verbose
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
TreeWidth=65533
InactiveLimit=0
MinJobAge=300
SlurmctldTimeout=10
SlurmdParameters=config_overrides
RebootProgram=/bin/true
"""


def slurm_conf(controller: tuple[str, str], nodes: Mapping[str, str], site: Site) -> str:
    """/etc/slurm/slurm.conf, the same on all machines. `controller`, `nodes`: names and addresses."""
    name, address = controller
    shape = f"CPUs={site.cpus} Boards=1 SocketsPerBoard=1 CoresPerSocket={site.cpus} ThreadsPerCore=1 RealMemory=1000"
    gres = f" Gres=gpu:{site.gpus}" if site.gpus else ""
    lines = [
        COMMON.format(state=STATE).rstrip(),
        f"SlurmctldHost={name}({address})",
        f"SlurmdTimeout={round(longer(site.lost_after_s))}",
        f"MessageTimeout={round(longer(site.answer_within_s))}",
        f"KillWait={site.kill_wait_s}",
        f"ReturnToService={site.returns}",
        *(["GresTypes=gpu"] if site.gpus else []),
        *(f"NodeName={node} NodeAddr={place} {shape}{gres} State=UNKNOWN" for node, place in nodes.items()),
        *site.partition_lines(),
        *site.more,
    ]
    return "\n".join([*lines, ""])


def gres_conf(site: Site) -> str:
    """A GPU has to be a device: links to /dev/null are taken for some."""
    files = f" Flags=nvidia_gpu_env File={DEVICES}/nvidia[0-{site.gpus - 1}]" if site.gpus else ""
    return "\n".join(["AutoDetect=off", *([f"Name=gpu{files}"] if site.gpus else []), ""])


def cgroup_conf() -> str:
    """From 23.02 on it can be said that there are none; before, nobody asks."""
    return "CgroupPlugin=disabled\n" if version() >= (23, 2) else ""


def version() -> tuple[int, int]:
    """Of the Slurm that is installed, as (22, 5)."""
    said = subprocess.run([find("slurmd") or "slurmd", "-V"], text=True, capture_output=True, check=True).stdout
    found = re.search(r"(\d+)\.(\d+)", said)
    assert found is not None, said
    return int(found[1]), int(found[2])
