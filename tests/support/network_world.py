"""A world of paths for tests of what agents make of reports and pages: processes that report, and time that passes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torchrelay.agent.network.findings import Finding, Judge
from torchrelay.agent.network.paths import Link
from torchrelay.wire.files.launch import PathLimits
from torchrelay.wire.messages.netreport import NetPage, Report, Row, RowState

WALL_S = 1_750_000_000  # when the world begins, in seconds since 1970
STEP_S = 0.5
A, B, C = "10.0.1.2", "10.0.1.3", "10.0.1.4"  # peers on the first path
SECOND = "10.0.2.1"  # our address on the second


def local_of(path: int) -> str:
    return f"10.0.{path + 1}.1"


@dataclass
class Figures:
    """A link as a process has it."""

    up: bool = True
    live: int = 1
    lost_at: float = 0.0
    sent: int = 0
    received: int = 0
    rate: float = 0.0  # bytes a second, in each direction
    receives: float | None = None  # another rate for this direction
    suspect: bool = False
    round_trip_us: int = 250


@dataclass
class World:
    """One node. `links` by process, path and peer."""

    limits: PathLimits = field(default_factory=PathLimits)
    now: float = 1000.0
    links: dict[tuple[int, int, str], Figures] = field(default_factory=dict)
    stopped: set[int] = field(default_factory=set)  # processes whose pages stand still
    paged: bool = True

    def __post_init__(self) -> None:
        self.judge = Judge(self.limits)

    # ------------------------------------------------------------ what happens

    def use(self, *links: tuple[int, int, str]) -> World:
        """Processes connect, and pages tell of it."""
        for link in links:
            self.links[link] = Figures()
        self.now += 0.01  # a page of the same moment would be the same page
        self.show()
        return self

    def report(self, what: str, pid: int = 1, path: int = 0, remote: str = A, **more: Any) -> None:
        """One report, without anything that follows from it."""
        fields: dict[str, Any] = {"v": 1, "what": what, "ts": self.wall, "pid": pid, **more}
        if what in ("path_down", "path_up", "corrupt"):
            fields |= {"path": path, "interface": f"eth{path}", "local": local_of(path), "remote": remote}
        self.judge.paths.heard(Report(**fields), self.now)

    def lose(self, pid: int = 1, path: int = 0, remote: str = A, reason: str = "silent", *, told: bool = True) -> None:
        """A process loses a link. `told`: its report arrives."""
        figures = self.links[pid, path, remote]
        figures.up, figures.live, figures.lost_at = False, 0, self.now
        if told:
            self.report("path_down", pid, path, remote, reason=reason, under_way=2)

    def heal(self, pid: int = 1, path: int = 0, remote: str = A, *, told: bool = True) -> None:
        """... and has it back."""
        figures = self.links[pid, path, remote]
        outage = round((self.now - figures.lost_at) * 1000)
        figures.up, figures.live = True, 1
        if told:
            self.report("path_up", pid, path, remote, outage_ms=outage)

    def leave(self, pid: int = 1, path: int = 0, remote: str = A) -> None:
        """A process closes its comms: the link is not used any more."""
        del self.links[pid, path, remote]

    def wait(self, seconds: float) -> None:
        """Time passes: pages are read and paths judged, twice a second."""
        for _ in range(round(seconds / STEP_S)):
            self.now += STEP_S
            for figures in self.links.values():
                if figures.up:
                    figures.sent += round(figures.rate * STEP_S)
                    receives = figures.rate if figures.receives is None else figures.receives
                    figures.received += round(receives * STEP_S)
            self.show()
            self.judge.judge(self.now)

    def show(self) -> None:
        """All pages are read."""
        for pid in sorted({pid for pid, _, _ in self.links}):
            if self.paged and pid not in self.stopped:
                self.judge.paths.looked(self.page(pid), self.now)

    # ------------------------------------------------------------ what there is

    @property
    def wall(self) -> float:
        return WALL_S + self.now

    def page(self, pid: int) -> NetPage:
        rows = tuple(
            row(path, remote, figures, WALL_S) for (who, path, remote), figures in self.links.items() if who == pid
        )
        return NetPage(pid=pid, rank=pid, updated_us=round(self.wall * 1e6), rows=rows)

    def link(self, path: int = 0, remote: str = A) -> Link:
        return self.judge.paths.links[local_of(path), remote]

    def finding(self, path: int = 0) -> Finding | None:
        return self.judge.findings.get(local_of(path))

    @property
    def ours(self) -> list[str]:
        """The paths for which this node is to be left."""
        return sorted(finding.local for finding in self.judge.findings.values() if finding.ours)


def row(path: int, remote: str, figures: Figures, wall_s: float) -> Row:
    state = RowState.DOWN if not figures.up else RowState.SUSPECT if figures.suspect else RowState.UP
    return Row(
        interface=f"eth{path}",
        local=local_of(path),
        remote=remote,
        path=path,
        live=figures.live,
        state=state,
        round_trip_us=figures.round_trip_us,
        sent_bytes=figures.sent,
        received_bytes=figures.received,
        sent_again=0,
        duplicates=0,
        downs=0,
        ups=0,
        corrupt=0,
        down_since_us=0 if figures.up else round((wall_s + figures.lost_at) * 1e6),
    )


def two_peers(**limits: Any) -> World:
    """A process with two paths to each of two peers."""
    return World(PathLimits(**limits)).use((1, 0, A), (1, 1, A), (1, 0, B), (1, 1, B))


def one_peer(**limits: Any) -> World:
    """A process with two paths to a peer whose address is higher than ours."""
    return World(PathLimits(**limits)).use((1, 0, A), (1, 1, A))
