"""The plan of a machine: what its init is told at the start."""

from __future__ import annotations

import os
import pwd
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
# A machine has these for itself, fresh, each with its mode.
OWN = {"/tmp": 0o1777, "/var/tmp": 0o1777, "/dev/shm": 0o1777, "/run": 0o755, "/root": 0o700, "/home": 0o755}


@dataclass(frozen=True)
class Plan:
    """All that a machine's init needs to know."""

    name: str
    hosts: str  # /etc/hosts
    own: dict[str, int]  # folders of its own, with their modes
    visible: tuple[str, ...]  # the host's folders below these, to be read
    shared: dict[str, str]  # where it is in the machine, and where on the host: to be written too

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def own_folders() -> dict[str, int]:
    """What each machine has for itself; homes of users too, wherever they are."""
    homes = {os.environ.get("HOME", "/root"), *(user.pw_dir for user in pwd.getpwall() if user.pw_uid >= 1000)}
    found = {folder: mode for folder, mode in OWN.items() if Path(folder).is_dir()}
    for home in sorted(homes):
        if Path(home).is_dir() and Path(home).parent != Path(home) and not is_below(home, found):
            found[home] = 0o700
    return found


def visible_folders(more: Iterable[str | Path]) -> tuple[str, ...]:
    """The repository, the interpreter, PYTHONPATH, and what a test asks for, outermost first."""
    paths = os.environ.get("PYTHONPATH", "").split(":")
    wanted = [REPOSITORY, sys.prefix, sys.base_prefix, *paths, *more]
    found = {os.path.abspath(path) for path in wanted if str(path) and Path(path).is_dir()}
    return tuple(sorted(found | {os.path.realpath(path) for path in found}))


def is_below(path: str, folders: Iterable[str]) -> bool:
    """Whether it is one of these folders or below one of them."""
    return any(Path(path).is_relative_to(folder) for folder in folders)


def hosts_file(addresses: Mapping[str, str]) -> str:
    """What /etc/hosts says on every machine."""
    return "\n".join(["127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses.items()), ""])


def make_plan(
    name: str, addresses: Mapping[str, str], visible: Iterable[str | Path], shared: Mapping[str, str | Path]
) -> Plan:
    """The plan of the machine of this name among those of `addresses`."""
    own = own_folders()
    below = tuple(path for path in visible_folders(visible) if is_below(path, own))
    if swallowed := [path for path in below if path in own]:
        raise ValueError(f"{swallowed[0]} would be read-only, and each machine's own as well: which is it?")
    folders = {place: os.path.realpath(folder) for place, folder in shared.items()}
    return Plan(name=name, hosts=hosts_file(addresses), own=own, visible=below, shared=folders)
