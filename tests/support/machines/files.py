"""The file system of a machine: the host's, read-only, with folders of its own."""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.machines import kernel
from tests.support.machines.plan import Plan

# Here the new root is put together, in a mount namespace of its own: a machine's /proc is not the host's anyway.
STAGE = Path("/proc")
FRESH = ("proc", "sys")
CGROUPS = "/sys/fs/cgroup"


def build_root(plan: Plan) -> None:
    """Make it and enter it. Raises `OSError`."""
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", STAGE, "tmpfs", options="mode=755")
    show_host()
    for place in plan.shared:
        make_place(place, root_is_open=True)
    kernel.make_read_only(STAGE)
    mount_kernel_views()
    for folder, mode in sorted(plan.own.items()):
        kernel.mount("tmpfs", staged(folder), "tmpfs", options=f"mode={mode:o}")
    show_visible(plan)
    for place, folder in plan.shared.items():
        make_place(place, root_is_open=False)
        kernel.bind(folder, staged(place))
    name_machines(plan)
    kernel.change_root(STAGE)
    os.umask(0o022)


def staged(path: str | Path) -> Path:
    """Where the new root has it as yet."""
    return STAGE / Path(path).relative_to("/")


def show_host() -> None:
    """Whatever is in the host's root is in the new one too."""
    for entry in os.scandir("/"):
        place = STAGE / entry.name
        if entry.is_symlink():
            place.symlink_to(os.readlink(entry.path))
        elif entry.is_dir():
            place.mkdir()
            if entry.name not in FRESH:
                kernel.bind(entry.path, place)
        elif entry.is_file():
            place.touch()
            kernel.bind(entry.path, place)


def mount_kernel_views() -> None:
    """What the kernel shows of this machine's processes, network and terminals."""
    kernel.mount("proc", staged("/proc"), "proc")
    kernel.mount("sysfs", staged("/sys"), "sysfs", kernel.MS_RDONLY)
    if Path(CGROUPS).is_dir():
        kernel.bind(CGROUPS, staged(CGROUPS))
        kernel.make_read_only(staged(CGROUPS))
    if Path("/dev/pts").is_dir():
        kernel.mount("devpts", staged("/dev/pts"), "devpts", options="newinstance,ptmxmode=0666,mode=620")
    # For a network that starts here; addresses of link level would only add noise.
    staged("/proc/sys/net/ipv6/conf/default/disable_ipv6").write_text("1")
    kernel.bind(staged("/proc/sys"), staged("/proc/sys"))
    kernel.make_read_only(staged("/proc/sys"))


def show_visible(plan: Plan) -> None:
    """The host's folders that are to be seen below the machine's own ones."""
    for folder in plan.visible:
        place = staged(folder)
        if not place.is_dir():  # it may be below another one
            place.mkdir(parents=True)
            kernel.bind(folder, place)
            kernel.make_read_only(place)


def make_place(place: str, *, root_is_open: bool) -> None:
    """A folder to mount on. While the root is open, only what is to be in no folder of the host's is made."""
    if not root_is_open:
        staged(place).mkdir(parents=True, exist_ok=True)
    elif not (STAGE / Path(place).parts[1]).exists():
        staged(place).mkdir(parents=True)


def name_machines(plan: Plan) -> None:
    """/etc/hosts and /etc/hostname of its own, over the host's."""
    folder = staged("/run/etc")
    folder.mkdir()
    for path, words in {"/etc/hosts": plan.hosts, "/etc/hostname": f"{plan.name}\n"}.items():
        mine = folder / Path(path).name
        mine.write_text(words)
        if staged(path).exists():
            kernel.bind(mine, staged(path))
