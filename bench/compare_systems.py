"""Systems: how each of those that are compared is started, where its ranks are, and how it loses or moves one."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from compare_processes import all_of, is_alive, is_stopped, kill_all, send
from compare_schedule import Fault, What
from steady import environment
from torchrelay.chaos.deeds import plan_deed
from torchrelay.chaos.faults import Gone
from torchrelay.chaos.whereabouts import Refusal, Whereabouts
from torchrelay.chaos.wishes import Deed, Facts, Wish
from torchrelay.client.client import Away, Client, Denied
from torchrelay.protocol.messages.ids import NodeId

RIVALS = Path(__file__).parent / "rivals"
RANKS = 4
TIMEOUT_S = 10.0  # of collectives, everywhere but in the tuned NVRx
MARK = "TORCHRELAY_COMPARE"  # in the environment of all processes of a system
TORCHFT_TIMES_MS = {"a": (5000, 10000), "b": (1000, 1000), "c": (300, 300)}  # heartbeat, join


class Job(Struct, frozen=True, kw_only=True):
    """What a system is to do: `order` is that of `rivals/task.py`, `losses` how many processes the faults will cost."""

    folder: Path
    order: dict[str, Any]
    losses: int


class System:
    """One system at work."""

    def __init__(self, job: Job, python: Path) -> None:
        self.job, self.python, self.folder = job, python, job.folder
        self.children: list[subprocess.Popen[bytes]] = []
        self.folder.mkdir(parents=True)
        (self.folder / "order.json").write_text(json.dumps({**job.order, "folder": str(self.folder)}))
        self._log = (self.folder / "output.log").open("ab")

    def start(self) -> None:
        raise NotImplementedError

    def begin(self, *words: str, **more: str) -> subprocess.Popen[bytes]:
        """Start a process of the system, in a session of its own. `more`: for its environment."""
        known = environment(**{MARK: str(self.folder), **more})
        child = subprocess.Popen(words, stdout=self._log, stderr=self._log, env=known, start_new_session=True)
        self.children.append(child)
        return child

    def tend(self) -> None:
        """What somebody beside the system does all the time: nothing, for most."""

    def ended(self) -> int | None:
        """The exit code, when it has ended."""
        return self.children[0].poll()

    def pid_of(self, rank: int) -> int | None:
        """The process of a rank, if it lives."""
        try:
            pid = int((self.folder / "pids" / f"rank-{rank}").read_text())
        except (FileNotFoundError, ValueError):
            return None
        return pid if is_alive(pid) else None

    def strike(self, fault: Fault) -> tuple[int, ...]:
        """Make the fault; returns the ranks that were hit. Raises ProcessLookupError if there was nobody."""
        pids = {rank: self.pid_of(rank) for rank in fault.ranks}
        if None in pids.values():
            raise ProcessLookupError(f"rank {fault.rank} is not there")
        for pid in pids.values():
            assert pid is not None
            self.hit(fault.what, pid)
        return tuple(pids)

    def hit(self, what: What, pid: int) -> None:
        signals = {What.STOP: signal.SIGSTOP, What.LEAVE: signal.SIGTERM}
        os.kill(pid, signals.get(what, signal.SIGKILL))

    def cpu_pids(self) -> list[int]:
        return all_of(MARK, str(self.folder))

    def ledger(self) -> list[dict[str, Any]] | None:
        """What it has recorded itself about its recoveries; None if it does not."""
        return None

    def tail(self, lines: int = 15) -> str:
        """The end of what it has said."""
        text = (self.folder / "output.log").read_text(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def stop(self) -> None:
        """End all that is left of it, also what hangs or was stopped."""
        kill_all(self.children, lambda: self.cpu_pids())
        self._log.close()


class Torchrun(System):
    """Plain PyTorch: all ranks start again, from the last checkpoint, when one is lost.

    A process that is stopped is not ended by SIGTERM: torchrun waits 30 s for it in a restart, and its flag
    --shutdown-timeout counts at the end only. So who is careful has a watchdog; here the bench is in its place.
    """

    def __init__(self, job: Job, python: Path, *, watched: bool) -> None:
        super().__init__(job, python)
        self._hung = Hung(TIMEOUT_S) if watched else None

    def tend(self) -> None:
        if self._hung is not None:
            for pid in filter(None, map(self.pid_of, range(RANKS))):
                if self._hung.is_due(pid):
                    send(pid, signal.SIGKILL)

    def start(self) -> None:
        words = [str(self.python), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        words += ["--max-restarts", "1000", "--monitor-interval", "0.1"]
        # Without it restarted ranks read the keys of the attempt before and connect to dead addresses.
        variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        self.begin(*words, str(RIVALS / "torchrun_worker.py"), str(self.folder), **variables)

    def hit(self, what: What, pid: int) -> None:
        if what is What.LEAVE and self.job.order.get("notice"):
            os.kill(pid, signal.SIGUSR1)
        else:
            super().hit(what, pid)


class TorchFt(System):
    """TorchFT: a lighthouse, and a replica group for each rank. Somebody has to start again those that end, or hang."""

    def __init__(self, job: Job, python: Path, times: str) -> None:
        super().__init__(job, python)
        self._beat_ms, self._join_ms = TORCHFT_TIMES_MS[times]
        self._port = free_port()
        self._replicas: dict[int, subprocess.Popen[bytes]] = {}
        self._hung = Hung(TIMEOUT_S)

    def start(self) -> None:
        lighthouse = self.python.with_name("torchft_lighthouse")
        words = [str(lighthouse), "--bind", f"[::]:{self._port}", "--min_replicas", "1"]
        words += ["--heartbeat_timeout_ms", str(self._beat_ms), "--join_timeout_ms", str(self._join_ms)]
        self.begin(*words, "--quorum_tick_ms", "100", RUST_LOG="error")
        for rank in range(RANKS):
            self._replica(rank)

    def _replica(self, rank: int) -> None:
        variables = {"TORCHFT_LIGHTHOUSE": f"http://localhost:{self._port}", "RUST_LOG": "error", "REPLICA": str(rank)}
        words = [str(self.python), str(RIVALS / "torchft_worker.py"), str(self.folder)]
        self._replicas[rank] = self.begin(*words, **variables)

    def _over(self) -> bool:
        """Whether some replica has come to the end: those that start now would train alone, from the beginning."""
        return any(
            child.poll() == 0 and (self.folder / "digests" / f"rank-{rank}").exists()
            for rank, child in self._replicas.items()
        )

    def tend(self) -> None:
        for rank, child in self._replicas.items():
            if self._hung.is_due(child.pid):
                child.kill()
            if child.poll() is not None and not self._over():
                self.children.remove(child)
                self._replica(rank)

    def ended(self) -> int | None:
        if (code := self.children[0].poll()) is not None:
            return code or 1  # the lighthouse
        codes = [child.poll() for child in self._replicas.values()]
        return 0 if self._over() and codes[0] is not None else None


class Nvrx(System):
    """NVRx in-process. What is lost comes not back, so it has as many reserve ranks as will be lost."""

    def start(self) -> None:
        everybody = RANKS + self.job.losses
        port = free_ports(2 + self.job.losses)
        for rank in range(everybody):
            variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": everybody, "MASTER_ADDR": "127.0.0.1"}
            variables |= {"MASTER_PORT": port, "TASK_PORT": port}
            texts = {name: str(value) for name, value in variables.items()}
            self.begin(str(self.python), str(RIVALS / "nvrx_worker.py"), str(self.folder), **texts)

    def ended(self) -> int | None:
        if len(list((self.folder / "digests").glob("rank-*"))) == RANKS:
            return 0
        if (code := self.children[0].poll()) is not None:
            return code or 1  # rank 0 holds the store
        return None


class Relay(System):
    """torchrelay, with warm spares on a node of their own, or with none."""

    def __init__(self, job: Job, python: Path, *flags: str) -> None:
        super().__init__(job, python)
        self._flags, self._run_dir = flags, self.folder / "run"
        # Without a spare a move waits for room, and nobody would leave: the rank is ended by SIGTERM, as elsewhere.
        self._spared = "--spare-nodes" in flags

    def start(self) -> None:
        words = [str(self.python), "-m", "torchrelay.cli.main", "run", "--nodes", "2", "--nproc-per-node", "2"]
        words += ["--slot-faults", "0", "--moves-per-hour", "-1", "--quiet", "--run-dir", str(self._run_dir)]
        self.begin(*words, *self._flags, str(RIVALS / "torchrelay_worker.py"), str(self.folder))

    def _rows(self) -> list[Any]:
        try:
            return [row for row in Client.of(self._run_dir).view_ranks().ranks if row.rank is not None and row.pid]
        except (Away, Denied, OSError):
            return []

    def pid_of(self, rank: int) -> int | None:
        found = [row.pid for row in self._rows() if row.rank == rank]
        return found[0] if found and is_alive(found[0]) else None

    def strike(self, fault: Fault) -> tuple[int, ...]:
        if fault.what is What.NODE:
            return self._lose_node()
        if fault.what is What.LEAVE and self._spared:
            body = {"ranks": [fault.rank]}
            try:
                client = Client.of(self._run_dir)
                client.change(f"/v1/jobs/{client.name_of(None)}/migrate", body, dry_run=False)
            except (Away, Denied) as error:
                raise ProcessLookupError(str(error)) from error
            return fault.ranks
        return super().strike(fault)

    def _lose_node(self) -> tuple[int, ...]:
        """Agent, forkserver, workers and their memory: of the node with most ranks, but for that of rank 0."""
        rows = self._rows()
        spared = {row.node for row in rows if row.rank == 0}
        counts = Counter(row.node for row in rows if row.node not in spared)
        if not counts:
            raise ProcessLookupError("all ranks are on the node of rank 0")
        node = max(sorted(counts), key=lambda one: counts[one])
        wish = Wish(deed=Deed.NODE, node=NodeId(node))
        try:
            client = Client.of(self._run_dir)
            plan_deed(wish, Facts(client.job(), client.view_ranks()), Whereabouts.of(self._run_dir)).act()
        except (Away, Denied, Refusal, Gone) as error:
            raise ProcessLookupError(str(error)) from error
        return tuple(sorted(row.rank for row in rows if row.node == node))

    def ledger(self) -> list[dict[str, Any]]:
        words = ["-m", "torchrelay.cli.main", "report", "--run-dir", str(self._run_dir), "-o", "jsonl"]
        said = subprocess.run([str(self.python), *words], capture_output=True, check=False, timeout=60).stdout
        return [msgspec.json.decode(line) for line in said.splitlines() if line.startswith(b"{")]


class Hung:
    """Who has been stopped by a signal for so long that somebody would end it."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._since: dict[int, float] = {}

    def is_due(self, pid: int) -> bool:
        if not is_stopped(pid):
            self._since.pop(pid, None)
            return False
        now = time.monotonic()
        return now - self._since.setdefault(pid, now) >= self._patience_s


def free_port() -> int:
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        return int(asked.getsockname()[1])


def free_ports(count: int) -> int:
    """The first of so many free ports in a row. Raises OSError if none were found."""
    for _ in range(100):
        first = free_port()
        if first + count < 65_536 and all(is_free(first + at) for at in range(count)):
            return first
    raise OSError(f"no {count} free ports in a row on 127.0.0.1")


def is_free(port: int) -> bool:
    with socket.socket() as asked:
        try:
            asked.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


class Entry(Struct, frozen=True, kw_only=True):
    """A system that can be compared. `needs`: the environment of a rival that it runs in."""

    name: str
    title: str
    make: Callable[[Job, Path], System]
    needs: str = ""
    order: dict[str, Any] = {}
    checkpoints: str = ""  # naive or tuned
    hang: str = ""  # who ends a rank that hangs, and when
    note: str = ""


def plain(job: Job, python: Path) -> System:
    return Torchrun(job, python, watched=False)


def torchft(times: str) -> Entry:
    beat, join = (f"{value / 1000:g} s" for value in TORCHFT_TIMES_MS[times])
    words = {"a": "documented", "b": "tuned", "c": "the floor on one machine"}[times]
    return Entry(
        name=f"torchft-{times}",
        title=f"TorchFT, timeouts {times.upper()} ({words})",
        make=lambda job, python: TorchFt(job, python, times),
        needs="torchft",
        hang="collectives 10 s; then the bench, in the place of a supervisor, kills what has been stopped for 10 s",
        note=f"heartbeat {beat}, join {join}, process group and manager 10 s, quorum and connect 60 s"
        + ("; so short a join timeout leaves out a replica that is slow but well" if times != "a" else ""),
    )


def nvrx(tuned: bool) -> Entry:
    return Entry(
        name="nvrx-tuned" if tuned else "nvrx-default",
        title=f"NVRx in-process, {'tuned' if tuned else 'default'} timeouts",
        make=Nvrx,
        needs="nvrx",
        order={"tuned": tuned, "timeout_s": 1.0 if tuned else TIMEOUT_S},
        checkpoints="tuned",
        hang="heartbeat 3 s, soft and hard timeout 10, 15 s" if tuned else "heartbeat 30 s, soft and hard 60, 90 s",
        note=f"Gloo {'1 s, 4 s to meet' if tuned else '10 s'}, which cannot be aborted; a reserve rank for each "
        "process to be lost, whose CPU time is counted; PyTorch's count of groups is set back before each try, as one "
        "that failed leaves it higher in those who took part, and they would not meet again; a rank that is to leave "
        "is ended by SIGTERM, without notice",
    )


def restart(tuned: bool) -> Entry:
    return Entry(
        name="restart-tuned" if tuned else "restart-naive",
        title="torchrun, checkpoint " + ("by Young/Daly, asynchronous" if tuned else "at a naive interval"),
        make=lambda job, python: Torchrun(job, python, watched=tuned),
        order={"asynchronous": tuned, "notice": tuned},
        checkpoints="tuned" if tuned else "naive",
        hang="collectives 10 s, "
        + ("and a watchdog, the bench in its place, 10 s" if tuned else "and 30 s until it is ended by SIGKILL"),
        note="told that a rank is to leave, it takes a checkpoint before"
        if tuned
        else "written in the step; a rank that is to leave is ended by SIGTERM, without notice",
    )


HANG = "stopped for 5 steps, at least 1 s"
NO_LIMITS = "slots are used again however often they lose a worker, and moves are not rationed"


def entries() -> list[Entry]:
    """All systems, in the order in which they run; `none` comes again at the end, to see how far the machine drifts."""
    return [
        Entry(name="none", title="plain PyTorch, no faults", make=plain, order={"measure": True}),
        restart(tuned=False),
        restart(tuned=True),
        *(torchft(times) for times in TORCHFT_TIMES_MS),
        nvrx(tuned=False),
        nvrx(tuned=True),
        Entry(
            name="torchrelay-spares",
            title="torchrelay, two spares",
            make=lambda job, python: Relay(job, python, "--spare-nodes", "1"),
            hang=HANG,
            note="two nodes of two ranks, the spares on a third; a node is lost with its agent and forkserver; a rank "
            "that is to leave moves; " + NO_LIMITS,
        ),
        Entry(
            name="torchrelay-shrink",
            title="torchrelay, no spare",
            make=lambda job, python: Relay(job, python, "--oversubscribe", "2"),
            hang=HANG,
            note="two nodes of two ranks; lost ranks begin in their own slots again, or share those of others; a rank "
            "that is to leave has no place to move to, and is ended by SIGTERM; " + NO_LIMITS,
        ),
    ]


def here() -> Path:
    """The interpreter that runs this."""
    return Path(sys.executable)
