"""Allocation: what Slurm has given to this run, and how an agent comes to each node of it: in a step of its own.

One step a node: whatever ends one srun ends one agent. SIGKILL of an srun makes its helper cancel the whole step, and
SIGTERM, too, kills all of its tasks at once. A node that is lost ends no step but its own (`--no-kill`).
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchrelay.client.runs import NotPossible
from torchrelay.schedulers.slurm.hostlists import expand

BAD_ARGUMENTS = 2
CANNOT_START = 94
# Steps with higher numbers are not started by srun: the batch script's, and the shell of salloc.
FIRST_SPECIAL = 0xFFFF_FF00
# What srun takes from its environment is for the user's own steps: how many processors a task has, where output goes.
# It tells the agent itself in which job it is.
OF_SLURM = ("SLURM_", "SRUN_", "SALLOC_", "SBATCH_")
KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_CLUSTERS")


@dataclass(frozen=True, slots=True)
class Allocation:
    """A job of Slurm's that we are in."""

    job: int
    nodes: tuple[str, ...]


def allocation_in(environ: Mapping[str, str]) -> Allocation | None:
    """The one that this process is in, if it has other nodes than this one.

    Under srun the first task sees to all nodes. Raises `NotPossible`: with code 0 in its other tasks.
    """
    number = environ.get("SLURM_JOB_ID", "")
    if not number.isdecimal():
        return None
    try:
        nodes = expand(environ.get("SLURM_JOB_NODELIST", ""))
    except ValueError as error:
        raise NotPossible(f"SLURM_JOB_NODELIST: {error}; give --no-slurm, or --hosts", BAD_ARGUMENTS) from error
    step = environ.get("SLURM_STEP_ID", "")
    if step.isdecimal() and int(step) < FIRST_SPECIAL:  # an ordinary step has its own nodes, not all of the job's
        nodes = expand(environ.get("SLURM_STEP_NODELIST", "")) or nodes
    if not nodes or (len(nodes) == 1 and environ.get("SLURMD_NODENAME") == nodes[0]):
        return None  # all is on this machine
    task = environ.get("SLURM_PROCID", "0")
    if "SLURM_STEP_ID" in environ and task != "0":
        raise NotPossible(f"task {task} of this step leaves all nodes to task 0", 0)
    if shutil.which("srun") is None:
        raise NotPossible("in a Slurm job, but srun is not on PATH: give --no-slurm, or --hosts", CANNOT_START)
    return Allocation(int(number), nodes)


def step_command(job: int, node: str, words: Sequence[str]) -> list[str]:
    """What runs an agent on a node of the job. Its pass goes over standard input, to this step alone."""
    where = [f"--jobid={job}", "--overlap", f"--nodelist={node}", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1"]
    lasting = ["--export=ALL", "--no-kill", "--wait=0", "--kill-on-bad-exit=0"]
    plain = ["--quiet", "--unbuffered", "--mpi=none", "--cpu-bind=none", "--job-name=torchrelay-agent"]
    return ["srun", *where, *lasting, *plain, *words]


def step_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of srun, and so of the agent."""
    return {name: value for name, value in environ.items() if not name.startswith(OF_SLURM) or name in KEPT}
