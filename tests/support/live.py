"""A job that trains on while a driver breaks it and moves its ranks, one act after the other; and what came of it all.

The script is tests/scripts/faulty.py with --live: what strikes stands in files of `folder`, which the driver writes.
4 ranks on 2 virtual nodes, and a node of 2 spares.
"""

from __future__ import annotations

import json
import random
import subprocess
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tests.support.jobs import SCRIPTS, Finished, end_job, start_job, torchrelay, wait_until
from tests.support.twins import undisturbed
from torchrelay.api.shown import JobStatus, MoveView, Nodes, Ranks, RankStatus, Status, TaintView
from torchrelay.chaos.whereabouts import Refusal, Whereabouts
from torchrelay.client.client import Away, Client, Denied

FLAGS = ["--nodes", "2", "--nproc-per-node", "2", "--spare-nodes", "1", "--slot-faults", "0", "--moves-per-hour", "-1"]
SLOTS = 2  # of each node
PROBATION = "torchrelay/probation"
RANKS, SPARES = 4, 2
HEARD_MS = 1_500
PATIENCE_S = 150.0  # for any fact of a job on a machine that has other work, too
OVER_S = 60.0
FREEZE = "FREEZE"


@dataclass(frozen=True)
class Look:
    """A job at a moment, as its orchestrator tells it."""

    status: Status
    job: JobStatus
    ranks: Ranks
    moves: tuple[MoveView, ...]

    def holder(self, rank: int) -> RankStatus:
        return next(row for row in self.ranks.ranks if row.rank == rank)

    @property
    def held(self) -> list[RankStatus]:
        return [row for row in self.ranks.ranks if row.rank is not None]

    def deadly(self, ranks: Collection[int | None]) -> bool:
        """Whether with these ranks the last holder of some state would be lost."""
        left = {row.shard for row in self.held if row.rank not in ranks}
        return any(row.shard not in left for row in self.held)

    @property
    def warm(self) -> int:
        return self.job.spares.warm

    @property
    def well(self) -> bool:
        """All ranks train, and nothing is under way."""
        heard = all(one.alive and one.silent_ms is not None and one.silent_ms < HEARD_MS for one in self.status.nodes)
        return (
            self.job.phase == "running"
            and self.job.move is None
            and not self.job.incidents.open
            and heard
            and not self.job.freezes
            and not any(row.replacement or not row.pid for row in self.held)
        )


@dataclass
class Live:
    """The job. `wrong` collects what was seen on the way that must not be."""

    folder: Path
    process: subprocess.Popen[str]
    chance: random.Random
    wrong: list[str] = field(default_factory=list)
    owners: dict[tuple[int, int], str] = field(default_factory=dict)
    nodes: dict[int, str] = field(default_factory=dict)  # where each rank began
    home: bool = False  # whether ranks return there by themselves
    names: int = 0

    @classmethod
    def begin(
        cls, work: Path, seed: int, flags: list[str], *, home: bool = False, pace_s: float = 0.02, layout: str = "ddp"
    ) -> Self:
        folder = work / "live"
        folder.mkdir()
        (folder / "plan.json").write_text("[]")
        script = [str(SCRIPTS / "faulty.py"), "--layout", layout, "--live", str(folder)]
        script += ["--steps", "1000000", "--pace", str(pace_s)]
        words = [*FLAGS, *flags, *(["--return-home"] if home else [])]
        live = cls(folder, start_job(work / "run", script, words), random.Random(seed), home=home)
        try:
            live.until("training", lambda look: look.job.joined and look.well and (look.job.step or 0) >= 3)
            live.nodes = {row.rank: str(row.node) for row in live.settled().held if row.rank is not None}
        except BaseException:
            live.kill()
            raise
        return live

    @property
    def run_dir(self) -> Path:
        return self.folder.parent / "run"

    @property
    def client(self) -> Client:
        return Client.of(self.run_dir)

    # ------------------------------------------------------------ looking

    def look(self) -> Look | None:
        """None while nobody answers. Raises `AssertionError` if the job has ended."""
        assert self.process.poll() is None, f"the job has ended\n{self.told()}"
        try:
            client = self.client
            status = client.view_status()
            look = Look(status, status.jobs[-1], client.view_ranks(), client.view_moves().moves)
        except (Away, Denied, IndexError, ValueError):
            return None
        self.note_owners(look)
        return look

    def note_owners(self, look: Look) -> None:
        """In a generation one worker is connected as a rank. Before that a replacement that is lost may be replaced."""
        unsettled = look.job.phase in ("agreeing", "preparing", "starting")
        if unsettled or look.job.generation != look.ranks.generation:
            return
        for row in look.held:
            if row.worker is None or row.rank is None:
                continue
            first = self.owners.setdefault((int(look.ranks.generation), int(row.rank)), row.worker)
            if first != row.worker:
                self.wrong.append(f"rank {row.rank} had {first} and {row.worker} in generation {look.ranks.generation}")

    def until(self, what: str, fact: Callable[[Look], Any], deadline_s: float = PATIENCE_S) -> Look:
        """Wait until a fact holds of a look."""
        seen: list[Look] = []

        def holds() -> bool:
            look = self.look()
            seen[:] = [look] if look is not None else []
            return look is not None and bool(fact(look))

        try:
            wait_until(what, holds, deadline_s=deadline_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.told()}") from None
        return seen[0]

    def settled(self) -> Look:
        """Nothing is under way, spares are warm, and training has gone on since: the next act may come."""
        self.clear_quarantines()
        look = self.until("all is well again", lambda look: look.well and look.warm >= SPARES)
        step = look.job.step or 0
        return self.until("steps after that", lambda look: look.well and (look.job.step or 0) > step + 2)

    def clear_quarantines(self) -> None:
        """Places that have failed too often are out of use until somebody says otherwise: that is us."""
        for taint in self.taints(PROBATION):
            if taint.effect == "NoSchedule":
                self.order("untaint", taint.place, PROBATION)

    def taints(self, key: str) -> list[TaintView]:
        """The taints of this key that lie now."""
        found: list[Nodes] = []

        def asked() -> bool:
            try:
                found[:] = [self.client.view_nodes()]
            except (Away, Denied, ValueError):
                return False
            return True

        wait_until("the nodes", asked, deadline_s=OVER_S)
        return [taint for node in found[0].nodes for taint in node.taints if taint.key == key]

    def told(self) -> str:
        """For people: how the job stands."""
        words = [
            torchrelay(*verb, "--run-dir", str(self.run_dir)).stdout for verb in (["status"], ["ranks"], ["moves"])
        ]
        out = [line for line in (self.folder.parent / "run.out").read_text().splitlines() if "] step " not in line]
        return "\n".join([*words, "\n".join(out)[-2500:]])

    def whereabouts(self) -> Whereabouts:
        return Whereabouts.of(self.run_dir)

    def all_agents(self) -> bool:
        try:
            return all(self.whereabouts().agents().values()) and bool(self.whereabouts().orchestrator())
        except Refusal:
            return False

    def at_home(self, look: Look) -> bool:
        """Whether all ranks are where they began, but for those whose place other ranks have taken meanwhile."""
        there = Counter(str(row.node) for row in look.held)
        homes = [(self.nodes[row.rank], row.node) for row in look.held if row.rank is not None]
        return all(home == node or there[home] == SLOTS for home, node in homes)

    # ------------------------------------------------------------ doing

    def name(self) -> str:
        """A new name for a strike."""
        self.names += 1
        return f"a{self.names}"

    def order(self, *words: str) -> None:
        """Give an order by the command line."""
        at = ["--run-dir", str(self.run_dir), "--yes"]
        done = torchrelay(*words, *at)
        if done.returncode != 0 and "no orchestrator" in done.stderr + done.stdout:
            self.until("the orchestrator", lambda _: True)
            done = torchrelay(*words, *at)
        assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}\n{self.told()}"

    def call(self, path: str, **body: Any) -> None:
        """Give an order by the API."""
        self.client.change(path, body, dry_run=False)

    def migrate(self, *ranks: int) -> None:
        self.call(f"/v1/jobs/{self.client.name_of(None)}/migrate", ranks=ranks, reason="a test")

    def freeze(self) -> None:
        """Nothing is moved from the moment on at which this returns."""
        (self.run_dir / FREEZE).write_text("a test\n")
        self.until("the freeze", lambda look: look.job.freezes)

    def unfreeze(self) -> None:
        (self.run_dir / FREEZE).unlink(missing_ok=True)
        self.until("the end of the freeze", lambda look: not look.job.freezes)

    def arm(self, file: str, value: Any) -> None:
        """What is to strike from now on."""
        draft = self.folder / f".{file}"
        draft.write_text(json.dumps(value))
        draft.replace(self.folder / file)

    def disarm(self) -> None:
        self.arm("plan.json", [])
        (self.folder / "cell.json").unlink(missing_ok=True)

    def mark(self, name: str, deadline_s: float = OVER_S) -> None:
        """Wait for a file of `folder`."""

        def there() -> bool:
            assert self.process.poll() is None, f"the job has ended\n{self.told()}"
            return any(self.folder.glob(name))

        try:
            wait_until(f"the strike {name}", there, deadline_s=deadline_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.told()}") from None

    def end(self) -> Finished:
        """Let the script end, after the epoch."""
        (self.folder / "stop").touch()
        return end_job(self.process, self.run_dir, timeout_s=PATIENCE_S)

    def kill(self) -> None:
        """After a violation: nothing may be left."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(OVER_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(OVER_S)


# ---------------------------------------------------------------- the undisturbed twin


class Twin:
    """The same training, undisturbed: as long as the longest that was compared with it, and kept."""

    def __init__(self, layout: str = "ddp") -> None:
        self.layout = layout
        self.steps = 0
        self.calm: Finished | None = None

    def of(self, steps: int) -> Finished:
        """A twin of at least so many steps."""
        if self.calm is None or self.steps < steps:
            self.steps = -(-steps // 100) * 100
            script = [str(SCRIPTS / "faulty.py"), "--layout", self.layout, "--steps", str(self.steps)]
            self.calm = undisturbed(script, world=RANKS, timeout_s=300 + self.steps)
        return self.calm

    def differences(self, done: Finished) -> list[str]:
        """Where a run that was disturbed differs from the beginning of its twin, as far as it went itself."""
        last = max((int(point.partition("+")[0]) for _, point in done.digests), default=0)
        calm = self.of(last + 1)
        told = []
        ends = {rank: last_of(done, rank) for rank in range(RANKS)}
        if len(set(ends.values())) != 1:
            told.append(f"ranks ended at {ends}")
        for (rank, point), digests in calm.digests.items():
            if number(point) >= max(ends.values()):
                continue  # where the script ended, its loops stand otherwise
            if (rank, point) not in done.digests:
                told.append(f"rank {rank} never stood at {point}")
            elif done.digests[rank, point] != digests:
                told.append(f"rank {rank} differs at {point}")
        strange = done.digests.keys() - calm.digests.keys()
        return told + [f"rank {rank} stood at {point}, which the undisturbed run never did" for rank, point in strange]


def number(point: str) -> tuple[int, int]:
    """A point as the digests have it, in the order of training."""
    step, _, section = point.partition("+")
    return int(step), int(section or 0)


def last_of(done: Finished, rank: int) -> tuple[int, int]:
    return max((number(point) for one, point in done.digests if one == rank), default=(0, 0))


def doubled(folder: Path) -> list[str]:
    """Ranks that two workers computed for in one generation, by the lines of the digests."""
    owners: dict[tuple[str, int], str] = {}
    told = []
    for path in sorted(folder.glob("rank-*.jsonl")):
        for line in path.read_text().splitlines():
            row = json.loads(line) if line.endswith("}") else None
            if row is None:
                continue
            first = owners.setdefault((path.stem, row["generation"]), row["worker"])
            if first != row["worker"]:
                told.append(f"{path.stem}: {first} and {row['worker']} in generation {row['generation']}")
    return list(dict.fromkeys(told))
