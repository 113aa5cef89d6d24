"""What runs on a machine in Slurm's jobs, told by the machine's own process table, whatever Slurm believes."""

from __future__ import annotations

from tests.support.machines.machine import Machine

# Slurm's own processes that its daemons leave behind when they are killed.
LEFT_BEHIND = ("slurmstepd:", "slurmctld:")


def in_jobs(machine: Machine) -> dict[int, str]:
    """What runs on a machine in jobs, and whatever looks after it: its command lines, by the machine's own numbers."""
    found = {}
    for pid in machine.pids():
        folder = machine.root / f"proc/{pid}"
        try:
            words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            variables = (folder / "environ").read_bytes()
        except OSError:
            continue  # it has ended
        if b"\0SLURM_JOB_ID=" in b"\0" + variables or words.startswith(LEFT_BEHIND):
            found[pid] = words
    return found


def no_more_jobs(machine: Machine) -> bool:
    """Whether there are none. Those there are get killed, which may have started more meanwhile."""
    if found := in_jobs(machine):
        machine.run(["kill", "-KILL", *map(str, found)], check=False)  # some may have ended just now
    return not found and not any(has_ended(machine, pid) for pid in machine.pids())


def has_ended(machine: Machine, pid: int) -> bool:
    """Whether it is a zombie: nobody can say any more whose it was, and its parent has not asked for its end yet."""
    try:
        return (machine.root / f"proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return False  # it is gone
