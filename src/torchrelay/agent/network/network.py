"""Network: the agent's ear for the network core (native/netpath) of its node's processes.

Reports arrive on a datagram socket, pages of figures lie in a folder; both are in the node's folder, which is open to
nobody else. Only processes that our forkserver has started, or their children, are heard: the kernel says who sent a
report. Everything else is dropped and counted, once it is certain that it is none of theirs (`Unclaimed`). The kernel
keeps but a few datagrams (ten, if nobody has changed it) for us, so of many reports at once some get lost: what they
tell the pages tell, too, half a second later.

In a run with --ib-failover the node's InfiniBand and RoCE ports are watched, too (`ports`).

What `findings` and `ports` make of it becomes taints of this node, or of the slots whose workers use the path if others
do not. They are lifted when it is over. An agent that is restarted goes on with what its predecessor knew: it is in a
file.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import socket
import stat
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import Struct, structs

from torchrelay.agent.network.findings import Finding, Held, Judge, Memory, Register, tell_paths
from torchrelay.agent.network.paths import Link, LinkState, reaches
from torchrelay.agent.network.ports import SYSFS, PortMemory, Ports, read_ports
from torchrelay.protocol.messages.events import Event
from torchrelay.protocol.messages.ids import NodeId
from torchrelay.wire.files.launch import PathLimits
from torchrelay.wire.files.procfs import ProcessGone, read_stat
from torchrelay.wire.messages.codec import WireError
from torchrelay.wire.messages.netreport import (
    MAX_REPORT,
    REPORT_SOCKET,
    STATS_FOLDER,
    decode_report,
    pages_in,
    read_page,
)
from torchrelay.wire.messages.pathnews import NetworkNews

logger = logging.getLogger(__name__)

MEMORY = "net-memory"  # in the node's folder
TICK_S = 0.5
NEWS_S = 5.0  # between two tellings if nothing has changed
PROBE_EVERY_S = 2.0
READ_AT_ONCE = 256  # datagrams, before others have their turn
GENERATIONS = 8  # how far a process may be from the worker that it belongs to
_CREDENTIALS = struct.Struct("3i")
_SIOCGIFFLAGS, _IFREQ, _IFNAMSIZ, _IFF_UP, _IFF_RUNNING = 0x8913, 40, 16, 0x1, 0x40  # linux/sockios.h, net/if.h


class Kept(Struct, frozen=True, kw_only=True):
    """What is in the file."""

    memory: Memory
    held: tuple[Held, ...]
    ports: PortMemory = PortMemory()


class Network:
    """The network paths of one node; to be made inside a running event loop.

    slot_of   the slot of the worker that has this process id, if it is one of ours
    tell      is called with taints, and with their end
    show      is called with the news
    adapters  what NCCL_IB_HCA says in the job: which InfiniBand and RoCE ports are used
    """

    def __init__(
        self,
        folder: Path,
        node: NodeId,
        limits: PathLimits,
        *,
        slot_of: Callable[[int], int | None],
        tell: Callable[[Event], None],
        show: Callable[[NetworkNews], None],
        adapters: str = "",
        sysfs: Path = SYSFS,
    ) -> None:
        self.judge = Judge(limits)
        self.ports = Ports(limits, adapters)
        self.register = Register(node, places_of=self._places, tell=tell)
        self.reports = self.malformed = self.strangers = 0
        self._folder = folder
        self._sysfs = sysfs
        self._slot_of = slot_of
        self._show = show
        self._slots: dict[int, int] = {}  # of the processes that were heard
        self._refused: set[int] = set()  # whose pages are not read
        self._unclaimed = Unclaimed()
        self._socket: socket.socket | None = None
        self._probing: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._probed: dict[tuple[str, str], float] = {}
        self._written = b""
        self._shown: tuple[object, float] = (None, 0.0)

    @property
    def socket_path(self) -> Path:
        return self._folder / REPORT_SOCKET

    @property
    def stats_folder(self) -> Path:
        return self._folder / STATS_FOLDER

    def environment(self) -> dict[str, str]:
        """What a worker must find so that its network core talks to us."""
        return {"TORCHRELAY_NET_REPORT": str(self.socket_path), "TORCHRELAY_NET_STATS": str(self.stats_folder)}

    def open(self) -> None:
        """Listen. A socket file that an earlier agent left is replaced."""
        self.stats_folder.mkdir(mode=0o700, exist_ok=True)
        found = self.stats_folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise ValueError(f"{self.stats_folder} is not a folder of ours alone (0700): remove it")
        self._remember()
        self.socket_path.unlink(missing_ok=True)
        ear = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        ear.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        ear.bind(str(self.socket_path))
        os.chmod(self.socket_path, 0o600)
        self._socket = ear
        asyncio.get_running_loop().add_reader(ear, self._read)

    def close(self) -> None:
        """Hear no more."""
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            self._socket = None
        for task in self._probing.values():
            task.cancel()
        self.socket_path.unlink(missing_ok=True)

    async def run(self) -> None:
        """Look at everything now and then, for ever."""
        while True:
            self.look()
            await asyncio.sleep(TICK_S)

    def look(self) -> None:
        """Read all pages, judge, and say what is new."""
        now = time.monotonic()
        self._hear_unclaimed()
        self._bury(now)
        self._read_pages(now)
        self._ask_the_kernel(now)
        self.judge.judge(now)
        if self.judge.limits.ports:
            self.ports.look(read_ports(self._sysfs), now)
        self.register.follow([*self.judge.findings.values(), *self.ports.findings.values()], self._names())
        self._probe(now)
        self._keep()
        self._tell_news(now)

    # ------------------------------------------------------------ reports

    def _read(self) -> None:
        for _ in range(READ_AT_ONCE):
            try:
                assert self._socket is not None, "it is read while it is open"
                data, extra, flags, _ = self._socket.recvmsg(MAX_REPORT, socket.CMSG_SPACE(_CREDENTIALS.size))
            except BlockingIOError:
                return
            except OSError as error:
                logger.warning("reports of the network core cannot be read: %s", error)
                return
            self._hear(Said(data, *sender(extra), cut=bool(flags & socket.MSG_TRUNC), at=time.monotonic()))

    def _hear(self, said: Said) -> None:
        """One datagram: of a worker, of one that we have not been told of yet, or of a stranger."""
        if said.user == os.getuid() and self._slot(said.pid) is not None:
            for each in (*self._unclaimed.claim(said.pid), said):
                self._heed(each)
        elif said.user != os.getuid() or not self._unclaimed.keep(said):
            self._ignore(said)

    def _hear_unclaimed(self) -> None:
        claimed, overdue = self._unclaimed.look(lambda pid: self._slot(pid) is not None)
        for said in claimed:
            self._heed(said)
        for said in overdue:
            self._ignore(said)

    def _ignore(self, said: Said) -> None:
        self.strangers += 1
        whose = f"process {said.pid} of user {said.user}"
        complain(self.strangers, f"a report of {whose}, which is no worker of ours")

    def _heed(self, said: Said) -> None:
        try:
            if said.cut:
                raise WireError(f"a report of more than {MAX_REPORT} bytes")
            report = decode_report(said.data)
            if report.pid != said.pid:
                raise WireError(f"it says that it is process {report.pid}")
        except WireError as error:
            self.malformed += 1
            complain(self.malformed, f"a report of process {said.pid}: {error}")
            return
        self.reports += 1
        links = report.remote or ", ".join(report.remotes)
        logger.info("process %d: %s %s %s", said.pid, report.what, links, report.reason)
        self.judge.paths.heard(report, said.at)

    def _slot(self, pid: int) -> int | None:
        """The slot of the worker to which a process belongs; None if it is none of ours."""
        if pid not in self._slots:
            slot = self._slot_above(pid)
            if slot is None:
                return None
            self._slots[pid] = slot
        return self._slots[pid]

    def _slot_above(self, pid: int) -> int | None:
        for _ in range(GENERATIONS):
            slot = self._slot_of(pid)
            if slot is not None:
                return slot
            try:
                pid = read_stat(pid).parent
            except ProcessGone:
                return None
        return None

    # ------------------------------------------------------------ pages

    def _read_pages(self, now: float) -> None:
        try:
            pages = list(pages_in(self.stats_folder))
        except OSError as error:
            logger.warning("the folder of pages is gone: %s", error)
            return
        unknown = set()
        for pid, path in pages:
            if not lives(pid):
                remove(path)  # it had no time to do so
            elif self._slot(pid) is None:
                unknown.add(pid)
            else:
                self._read_page(pid, path, now)
        for pid in sorted(self._unclaimed.pages(unknown)):
            self._refuse(pid, "which is no worker of ours")
        self._refused &= {pid for pid, _ in pages}

    def _read_page(self, pid: int, path: Path, now: float) -> None:
        try:
            page = read_page(path)
            if page is not None and page.pid != pid:
                raise WireError(f"it is named after process {pid} and says {page.pid}")
        except WireError as error:
            self._refuse(pid, str(error), malformed=True)
            return
        if page is not None:
            self.judge.paths.looked(page, now)

    def _refuse(self, pid: int, why: str, *, malformed: bool = False) -> None:
        """A page that is not read: counted and told once."""
        if pid not in self._refused:
            self._refused.add(pid)
            self.malformed += malformed
            self.strangers += not malformed
            logger.warning("dropped: the page of process %d: %s", pid, why)

    def _bury(self, now: float) -> None:
        """Processes that have ended say nothing any more."""
        for pid in [pid for pid in {*self._slots, *self.judge.paths.processes} if not lives(pid)]:
            self._slots.pop(pid, None)
            self.judge.paths.ended(pid, now)

    def _ask_the_kernel(self, now: float) -> None:
        """Of a link that is lost, and nobody said why: whether the interface is down. (A report may be dropped.)"""
        for link in self.judge.paths.links.values():
            if link.state is LinkState.DOWN and not link.reason and link.interface and not carries(link.interface):
                self.judge.paths.explain(link, "carrier", now)

    # ------------------------------------------------------------ taints

    def _names(self) -> dict[str, str]:
        """Of each path its interface, or its number where that is not known or not its alone."""
        interfaces: dict[str, set[str]] = {}
        for link in self.judge.paths.links.values():
            interfaces.setdefault(link.interface, set()).add(link.local)
        names = {}
        for finding in self.judge.findings.values():
            alone = finding.interface and len(interfaces.get(finding.interface, ())) < 2
            names[finding.local] = finding.interface if alone else f"path{finding.path}"
        return names | {name: name for name in self.ports.findings}

    def _places(self, finding: Finding) -> tuple[int | None, ...]:
        """The whole node, unless some of its workers have nothing to do with this path."""
        slots = {slot for pid in finding.pids if (slot := self._slots.get(pid)) is not None}
        return (None,) if finding.everyone or not slots else tuple(sorted(slots))

    # ------------------------------------------------------------ probes

    def _probe(self, now: float) -> None:
        for link in self.judge.probes():
            if link not in self._probing and now - self._probed.get(link, -PROBE_EVERY_S) >= PROBE_EVERY_S:
                self._probed[link] = now
                self._probing[link] = asyncio.create_task(self._try(self.judge.paths.links[link]))

    async def _try(self, link: Link) -> None:
        try:
            reached = await reaches(link.local, link.remote, self.judge.limits.probe_port, link.interface)
            self.judge.paths.probed(link.id, reached, time.monotonic())
        finally:
            self._probing.pop(link.id, None)

    # ------------------------------------------------------------ what the next agent must know

    def _keep(self) -> None:
        data = msgspec.json.encode(Kept(memory=self.judge.memory(), held=self.register.held, ports=self.ports.memory()))
        if data == self._written:
            return
        draft = self._folder / f"{MEMORY}.draft"
        try:
            draft.touch(mode=0o600)
            draft.write_bytes(data)
            draft.replace(self._folder / MEMORY)
            self._written = data
        except OSError as error:  # a full disk: it is tried again
            logger.warning("what is known of the network paths could not be kept: %s", error)

    def _remember(self) -> None:
        """Go on where an agent that died has stopped; say again what may not have been heard."""
        try:
            kept = msgspec.json.decode((self._folder / MEMORY).read_bytes(), type=Kept)
        except FileNotFoundError:
            return
        except (OSError, msgspec.DecodeError) as error:
            logger.warning("what was known of the network paths cannot be read: %s", error)
            return
        self.judge.remember(kept.memory, time.monotonic())
        self.ports.remember(kept.ports)
        self.register.go_on(kept.held)

    # ------------------------------------------------------------ news

    def _tell_news(self, now: float) -> None:
        """When something has changed that people wait for, and every few seconds."""
        paths = self.judge.paths
        gist = (
            {link.id: (link.state, len(link.flaps)) for link in paths.links.values()},
            {(f.local, f.kind, f.where, f.ours) for f in self.judge.findings.values()},
            len(paths.processes), self.malformed, self.strangers,
            {name: (port.active, len(port.flaps), port.gbps) for name, port in self.ports.ports.items()},
            {(name, found.kind) for name, found in self.ports.findings.items()},
        )  # fmt: skip
        if gist != self._shown[0] or now - self._shown[1] >= NEWS_S:
            self._shown = (gist, now)
            self._show(self.news(now))

    def news(self, now: float) -> NetworkNews:
        """All there is to tell."""
        told = tell_paths(self.judge, now, self.register.key_of)
        first = 1 + max((path.path for path in told.paths), default=-1)
        return structs.replace(
            told,
            paths=told.paths + self.ports.news(now, first, self.register.key_of),
            reports=self.reports,
            malformed=self.malformed,
            strangers=self.strangers,
        )


# ---------------------------------------------------------------- what the kernel says


def sender(extra: list[tuple[int, int, bytes]]) -> tuple[int, int]:
    """The process and the user that sent a datagram, by what the kernel says; (0, -1) if it does not."""
    for level, kind, data in extra:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS) and len(data) >= _CREDENTIALS.size:
            pid, user, _ = _CREDENTIALS.unpack_from(data)
            return pid, user
    return 0, -1


def lives(pid: int) -> bool:
    """Whether a process is there, and not merely waiting to be reaped."""
    try:
        return read_stat(pid).state != "Z"
    except ProcessGone:
        return False


def remove(path: Path) -> None:
    """Delete a page. What cannot be deleted (somebody has made a folder of that name) stays."""
    try:
        path.unlink()
    except OSError:
        pass


def carries(interface: str) -> bool:
    """Whether an interface is there and up, as far as the kernel tells (man 7 netdevice).

    Asked through a socket, as /sys may show the interfaces of another network namespace.
    """
    name = interface.encode()
    if not 0 < len(name) < _IFNAMSIZ:
        return False
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            found = fcntl.ioctl(asking, _SIOCGIFFLAGS, name.ljust(_IFREQ, b"\0"))
    except OSError as error:
        return error.errno != errno.ENODEV  # else nothing is known against it
    (flags,) = struct.unpack_from("=H", found, _IFNAMSIZ)
    return bool(flags & _IFF_UP and flags & _IFF_RUNNING)


def complain(times: int, what: str) -> None:
    """Say it when it has happened 1, 2, 4, 8, ... times: whoever does it may do it for ever."""
    if times & (times - 1) == 0:
        logger.warning("dropped: %s%s", what, f" ({times} so far)" if times > 1 else "")


# ---------------------------------------------------------------- what is said before we are told whose it is

# A worker runs as soon as it is forked. That it was forked is told to the agent on another socket, and an agent that
# had to wait for a processor may read the two in either order. So what nobody knows is not dropped before it has lain
# here from one look to the next but one; what a process has said is taken in the order in which it was said.

MOST = 64  # reports that are kept: strangers must not fill our memory


@dataclass(frozen=True)
class Said:
    """One datagram.

    pid, user   who has sent it, as the kernel says
    cut         it was longer than what is read of it
    at          when it came, in seconds of this machine's monotonic clock
    """

    data: bytes
    pid: int
    user: int
    cut: bool
    at: float


class Unclaimed:
    """Reports, and process ids of pages, that have not been claimed yet."""

    def __init__(self) -> None:
        self._before: list[Said] = []  # here since before the last look
        self._since: list[Said] = []
        self._pages: set[int] = set()

    def keep(self, said: Said) -> bool:
        """Whether there was room for it."""
        if len(self._before) + len(self._since) >= MOST:
            return False
        self._since.append(said)
        return True

    def claim(self, pid: int) -> list[Said]:
        """Those of a process that is known by now, in their order."""
        mine = [said for said in (*self._before, *self._since) if said.pid == pid]
        if mine:
            self._before = [said for said in self._before if said.pid != pid]
            self._since = [said for said in self._since if said.pid != pid]
        return mine

    def look(self, known: Callable[[int], bool]) -> tuple[list[Said], list[Said]]:
        """Of a look at all: the reports of processes that are known by now, and those that were kept long enough."""
        pids = dict.fromkeys(said.pid for said in (*self._before, *self._since))
        claimed = [said for pid in pids if known(pid) for said in self.claim(pid)]
        overdue, self._before, self._since = self._before, self._since, []
        return claimed, overdue

    def pages(self, unknown: set[int]) -> set[int]:
        """Of the process ids of unknown pages in this look: those that were unknown in the last one, too."""
        overdue = unknown & self._pages
        self._pages = unknown
        return overdue
