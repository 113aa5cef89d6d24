"""Abilities: what this Slurm, this job and this user's rights allow, from its version and settings. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from msgspec import Struct

from torchrelay.schedulers.slurm.reading import JobRecord, Partition, Version, version_of

OLDEST: Version = (22, 5, 0)
JSON_FROM: Version = (23, 2, 0)
EXPEDITE_FROM: Version = (25, 11, 0)
COMMENT_ONCE_BEFORE: Version = (23, 2, 0)
# In each series slurmctld could crash after a job was resized before this release.
SAFE_RESIZE: tuple[Version, ...] = ((23, 2, 7), (23, 11, 8), (24, 5, 0))
FORBIDDEN = "disable_job_shrink"
LEAST_GRACE_S = 30.0  # the usual --grace
KILL_WAIT_S = 30.0  # Slurm's own, where its configuration cannot be read
CHANGED_ONCE = "without slurmdbd a job can be shrunk once, and not be changed afterwards"


class Ability(Struct, frozen=True, kw_only=True):
    """Whether something can be done; why, or why not; and what to do about it. `able` is None if nobody can tell."""

    able: bool | None
    why: str
    remedy: str = ""


class Site(Struct, frozen=True, kw_only=True):
    """Slurm here: version, settings (`scontrol show config`), partitions."""

    version: Version
    config: dict[str, str]
    partitions: tuple[Partition, ...] = ()

    @property
    def accounting(self) -> bool:
        """Whether jobs are kept in a database, without which 22.05 takes few changes of a job."""
        return "slurmdbd" in self.config.get("AccountingStorageType", "")

    @property
    def graces(self) -> dict[str, float]:
        """How long jobs of each partition go on after the notice that they are preempted, in seconds."""
        return {each.name: float(each.grace_s) for each in self.partitions}

    def words(self, setting: str) -> set[str]:
        """The words of a setting that is a list."""
        return {word.strip().lower() for word in self.config.get(setting, "").split(",")}


def site_of(config: dict[str, str], partitions: Iterable[Partition]) -> Site:
    """Raises ValueError if the version cannot be told."""
    version = version_of(config.get("SLURM_VERSION", ""))
    if version is None:
        raise ValueError("no version of Slurm in its configuration")
    return Site(version=version, config=config, partitions=tuple(partitions))


def version_text(version: Version) -> str:
    """22.05.8, as Slurm writes it."""
    return f"{version[0]}.{version[1]:02d}.{version[2]}"


def is_safe_resize(version: Version) -> bool:
    """Whether slurmctld of this version survives the resize of a job for sure."""
    return any(version[:2] == safe[:2] and version >= safe for safe in SAFE_RESIZE) or version[:2] >= (24, 5)


def may_shrink(site: Site, *, at_our_risk: bool = False) -> Ability:
    """Whether a bad node is given back while the job runs."""
    if FORBIDDEN in site.words("SchedulerParameters"):
        remedy = f"ask the site to take {FORBIDDEN} out of SchedulerParameters"
        return Ability(able=False, why=f"{FORBIDDEN} is set: a bad node stays in the job, unused", remedy=remedy)
    if not is_safe_resize(site.version) and not at_our_risk:
        why = (
            f"{version_text(site.version)}: slurmctld may crash after a resize, so a bad node stays in the job, unused"
        )
        return Ability(able=False, why=why, remedy="Slurm 23.02.7, 23.11.8, 24.05 or later does not")
    if is_changed_once(site):
        why = f"{version_text(site.version)}: {CHANGED_ONCE}"
        return Ability(able=True, why=why, remedy="accounting by slurmdbd, or Slurm 23.02 or later, lifts this")
    return Ability(able=True, why="a bad node is given back while the job runs")


def is_changed_once(site: Site) -> bool:
    """Whether a job takes no further change after it was resized (`DB index is being set, try again`, for ever)."""
    return site.version < COMMENT_ONCE_BEFORE and not site.accounting


def may_preempt(site: Site, mine: str, wanted: str = "") -> Ability:
    """Whether jobs of another partition yield to ours. `wanted`: that partition; empty: any."""
    kind = site.config.get("PreemptType", "").rpartition("/")[2]
    if kind == "none" or not kind:
        return Ability(able=False, why="PreemptType is preempt/none", remedy="only idle nodes can be had")
    if kind != "partition_prio":
        return Ability(able=None, why=f"PreemptType is preempt/{kind}", remedy="`sacctmgr show qos` says who yields")
    if wanted and not any(each.name == wanted for each in site.partitions):
        known = ", ".join(sorted(each.name for each in site.partitions)) or "none"
        return Ability(able=False, why=f"there is no partition {wanted}", remedy=f"there are: {known}")
    found = [name for name in yielding(site, mine) if not wanted or name == wanted]
    if found:
        return Ability(able=True, why=f"{', '.join(found)}")
    which = f"partition {wanted} does not yield" if wanted else "no partition yields"
    remedy = "it needs a lower PriorityTier, a PreemptMode other than OFF, and nodes in common"
    return Ability(able=False, why=f"{which} to {mine}", remedy=remedy)


def may_park(site: Site, partition: Partition) -> Ability:
    """Whether a job of a partition that yields has the time to park when it is preempted."""
    name, least = partition.name, f"ask for a GraceTime of {LEAST_GRACE_S:g} s or more"
    if partition.grace_s >= LEAST_GRACE_S:
        return Ability(able=True, why=f"{name}: GraceTime {partition.grace_s} s; `torchrelay park --dry-run` compares")
    if partition.grace_s:
        remedy = f"{least}; until then `torchrelay park --dry-run` says whether that is enough for a job"
        return Ability(able=False, why=f"{name}: GraceTime is only {partition.grace_s} s", remedy=remedy)
    wait = f"{kill_wait_of(site):g} s"
    why = f"{name}: no GraceTime: SIGTERM goes to the batch script, too, and SIGKILL follows after {wait} (KillWait)"
    remedy = f"{least}; or start the job by `exec torchrelay run`, with a --grace of less than {wait}"
    return Ability(able=False, why=why, remedy=remedy)


def preemptable(site: Site) -> list[Partition]:
    """Partitions whose jobs yield to those of some other one."""
    if site.config.get("PreemptType", "").rpartition("/")[2] != "partition_prio":
        return []
    names = {name for each in site.partitions for name in yielding(site, each.name)}
    return [each for each in site.partitions if each.name in names]


def yielding(site: Site, mine: str) -> list[str]:
    """The partitions whose jobs Slurm would stop for one of ours."""
    ours = next((each for each in site.partitions if each.name == mine), None)
    if ours is None:
        return []
    return [
        each.name
        for each in site.partitions
        if each.tier < ours.tier and _stops(each, site) and each.nodes & ours.nodes
    ]


def _stops(partition: Partition, site: Site) -> bool:
    mode = partition.preempt_mode or site.config.get("PreemptMode", "OFF").upper()
    return mode not in ("OFF", "GANG", "DISABLED", "")


def kill_wait_of(site: Site) -> float:
    """Seconds between SIGTERM and SIGKILL for the processes of a job that ends."""
    found = re.match(r"\d+", site.config.get("KillWait", ""))
    return float(found[0]) if found else KILL_WAIT_S


def may_drain(site: Site, user: str, uid: int, level: str = "") -> Ability:
    """Whether we may drain nodes: as root, as SlurmUser, or as an operator by accounting (`level`)."""
    slurm_user = site.config.get("SlurmUser", "").partition("(")[0]
    if uid == 0 or user == slurm_user:
        return Ability(able=True, why=f"{user} administers this Slurm")
    if level in ("Operator", "Administrator"):
        return Ability(able=True, why=f"{user} is {level} in accounting")
    why = f"{user} has an ordinary user's rights: bad nodes are excluded from what we ask for, and not drained"
    return Ability(able=False, why=why, remedy="optional: an operator's rights (AdminLevel) let us drain them for all")


def saw_no_kill(script: str, submit_line: str, environ: dict[str, str]) -> Ability:
    """Whether the job was asked for with --no-kill, without which Slurm ends it together with a node."""
    remedy = "put `#SBATCH --no-kill` into the script, and --no-kill behind its srun"
    header = "\n".join(line for line in script.splitlines() if line.startswith("#SBATCH"))
    for where, text in (("the batch script", header), ("the submitting command", submit_line)):
        if {"--no-kill", "-k"} & set(text.split()):
            return Ability(able=True, why=f"seen in {where}")
    if any(name in environ for name in ("SBATCH_NO_KILL", "SLURM_NO_KILL", "SALLOC_NO_KILL")):
        return Ability(able=True, why="set in the environment")
    if script and submit_line:
        return Ability(able=False, why="neither in the batch script nor in the submitting command", remedy=remedy)
    return Ability(able=None, why="Slurm does not record it, and the batch script does not say it", remedy=remedy)


def left_of(job: JobRecord, now: float) -> float | None:
    """Seconds until the job's time limit; None if it has none."""
    return None if job.end_at is None else max(0.0, job.end_at - now)
