"""An ordinary user, who is known on all machines of a cluster and has rights over her own jobs only."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.machines.machine import Machine

ACCOUNTS = Path("/etc/passwd"), Path("/etc/group")


@dataclass(frozen=True)
class User:
    """An account of the machines: the host has none of this name."""

    name: str
    uid: int

    @property
    def home(self) -> str:
        return f"/home/{self.name}"

    def command(self, words: Sequence[str]) -> list[str]:
        """What root has to start so that these words run as this user."""
        return ["setpriv", f"--reuid={self.uid}", f"--regid={self.uid}", "--clear-groups", "--", *words]

    def environment(self) -> dict[str, str]:
        return {"HOME": self.home, "USER": self.name, "LOGNAME": self.name}


USER = User("ann", 4177)


def add_user(machine: Machine, user: User) -> None:
    """Make the account there, over the host's accounts, which stay as they are."""
    lines = f"{user.name}:x:{user.uid}:{user.uid}::{user.home}:/bin/sh\n", f"{user.name}:x:{user.uid}:\n"
    for path, line in zip(ACCOUNTS, lines, strict=True):
        own = machine.root / "run/etc" / path.name
        own.write_text(path.read_text() + line)
        machine.run(["mount", "--bind", f"/run/etc/{path.name}", str(path)])
    home = machine.root / user.home.lstrip("/")
    home.mkdir(mode=0o700, parents=True)
    os.chown(home, user.uid, user.uid)
