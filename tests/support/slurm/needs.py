"""What a Slurm for tests needs of this machine."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.support.machines.needs import obstacle

INSTALL = "apt-get update && apt-get install -y slurmctld slurmd slurm-client munge"
CONFIGURATION = Path("/etc/slurm")  # where Debian's Slurm looks for it; each machine has its own over it
DAEMONS = ("munged", "slurmctld", "slurmd")
CLIENTS = ("sbatch", "salloc", "srun", "scancel", "scontrol", "sinfo", "squeue")


def find(name: str) -> str | None:
    """A program's place. Daemons are where only root looks."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def slurm_obstacle() -> str:
    """Why there can be no Slurm here; empty if there can."""
    if missing := [name for name in (*DAEMONS, *CLIENTS) if find(name) is None]:
        return f"Slurm is not installed ({missing[0]} is not here): {INSTALL}"
    if not CONFIGURATION.is_dir():
        return f"{CONFIGURATION} is not here, where this Slurm would look for its configuration: {INSTALL}"
    if shutil.which("setpriv") is None:
        return "`setpriv` is not here: install util-linux"
    return obstacle()


needs_slurm = pytest.mark.skipif(bool(slurm_obstacle()), reason=slurm_obstacle() or "-")
