"""Running case scripts: plain and under torchrelay, disturbed, and what is to be said of the second beside the first.

    verdict = disturbed(tmp_path, "control", strike="grad:30:1")
    assert verdict.fate is Fate.EQUAL

How cases are written: README.md beside this file.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from tests.support.jobs import end_job, start_job, torchrelay
from tests.support.patience import longer
from tests.support.plain import run_plain
from torchrelay.client.client import Away, Client, Denied

CASES = Path(__file__).parent
FLAGS = ("--nproc-per-node", "2", "--spares", "1")
REFUSALS = (91, 93)
STANDS_S = 30.0  # without a line and without an end: that is a hang
BEGINS_S = longer(60.0)  # until the first line, or between the last one and the end: a busy machine starts slowly
EARLY = 10  # steps within which a refusal is early

Lines = dict[tuple[int, str, str], str]  # rank, step or "end", name of the value -> its bits, as they were last


class Fate(StrEnum):
    """What became of a disturbed run."""

    EQUAL = "equal"  # to the undisturbed run, to the bit
    REFUSED = "refused"  # 91 or 93, and nothing had been trained on a wrong replacement
    FELL_BACK = "fell back"  # all began anew, or from a snapshot, and came to the same bits
    LATE = "refused late"  # 91 or 93, but some steps had been trained to other bits
    FAILED = "failed"  # another exit code
    SILENT = "SILENT"  # exit code 0, and other bits
    HANG = "HANG"  # no line and no end


GOOD = (Fate.EQUAL, Fate.REFUSED, Fate.FELL_BACK)


@dataclass(frozen=True)
class Ran:
    """A run of a case script that has ended, or that was ended as it stood still."""

    code: int | None  # None: it stood still
    output: str
    lines: Lines
    struck: frozenset[str]
    run_dir: Path
    resolutions: tuple[str, ...] = ()
    moved: bool = False  # ranks, as planned

    @property
    def steps(self) -> int:
        """The last step of which there is a line."""
        return max((int(step) for _, step, _ in self.lines if step != "end"), default=0)

    @property
    def reason(self) -> str:
        """The lines of torchrelay in which the run says why it ended."""
        told = [line.strip() for line in self.output.splitlines() if "torchrelay" in line or "ended" in line]
        return "\n".join(told[-12:])


@dataclass(frozen=True)
class Verdict:
    """What is to be said of a disturbed run."""

    fate: Fate
    ran: Ran
    calm: Ran
    differences: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        """Short, as tests that fail say it."""
        why = self.why if self.fate is not Fate.EQUAL else ""
        return f"<{self.fate}, code {self.ran.code}, {self.ran.steps} steps: {self.differences[:1]} {why[:300]}>"

    def __str__(self) -> str:
        told = f"{self.fate} (exit code {self.ran.code}, after {self.ran.steps} steps)"
        return "\n".join([told, *self.differences[:8], self.ran.output[-3000:]])

    @property
    def good(self) -> bool:
        """Equal, refused before anything wrong was trained, or fallen back to the same bits."""
        return self.fate in GOOD

    @property
    def reason(self) -> str:
        return self.ran.reason

    @property
    def why(self) -> str:
        """The last line in which the run says why it ended."""
        told = [line for line in self.reason.splitlines() if "ended" in line or "Refused" in line or "refus" in line]
        return told[-1][:400] if told else ""


def judge(ran: Ran, calm: Ran) -> Verdict:
    """Compare a disturbed run with an undisturbed one. An undisturbed one that is refused counts for both."""
    if ran.code is None:
        return Verdict(Fate.HANG, ran, calm)
    wrong = differences(ran, calm)
    if ran.code in REFUSALS:
        return Verdict(Fate.LATE if wrong else Fate.REFUSED, ran, calm, wrong)
    if ran.code != 0:
        return Verdict(Fate.FAILED, ran, calm, wrong)
    wrong += [f"rank {key[0]} has no {key[2]} of {key[1]}" for key in sorted(calm.lines.keys() - ran.lines.keys())]
    if wrong or calm.code != 0:
        return Verdict(Fate.SILENT, ran, calm, wrong or [f"the undisturbed run ended with {calm.code}"])
    fell = {"fell back", "rolled back", "restarted"} & set(ran.resolutions)
    return Verdict(Fate.FELL_BACK if fell else Fate.EQUAL, ran, calm)


def differences(ran: Ran, calm: Ran) -> list[str]:
    """Where lines of the disturbed run are not those of the undisturbed one."""
    told = []
    for key, value in sorted(ran.lines.items()):
        if key not in calm.lines:
            if calm.code == 0:
                told.append(f"rank {key[0]} wrote a {key[2]} of {key[1]}, which the undisturbed run did not")
        elif calm.lines[key] != value:
            told.append(f"rank {key[0]}, {key[2]} of {key[1]}: {value}, undisturbed {calm.lines[key]}")
    return told


# ---------------------------------------------------------------- running


Driver = Callable[["Case"], None]


@dataclass
class Case:
    """A run of a case script that is under way."""

    process: subprocess.Popen[str]
    run_dir: Path
    out: Path

    def until(self, what: str, fact: Callable[[], object], *, deadline_s: float = 60) -> None:
        """Wait for a fact. Returns also if the run has ended: then that is what is looked at."""
        until = time.monotonic() + longer(deadline_s)
        while self.process.poll() is None and not fact():
            assert time.monotonic() < until, f"{what}: not within {deadline_s} s\n{self.printed()[-3000:]}"
            time.sleep(0.02)

    def until_step(self, step: int, rank: int = 0) -> None:
        """Wait until a rank has written its line of this step."""
        self.until(f"step {step} of rank {rank}", lambda: (rank, step) <= self.came_to(rank))

    def came_to(self, rank: int) -> tuple[int, int]:
        """The last step of which this rank has a line."""
        lines = read_lines(self.out)
        return rank, max((int(at) for of, at, _ in lines if of == rank and at != "end"), default=0)

    def printed(self) -> str:
        return (self.run_dir.parent / f"{self.run_dir.name}.out").read_text()

    def order(self, *words: str) -> str:
        """A verb of the command line about this run."""
        done = torchrelay(*words, "--run-dir", str(self.run_dir))
        return done.stdout + done.stderr

    def go(self) -> None:
        """Nothing more is to be done to it from outside."""
        (self.out / "go").touch()


def disturbed(
    work: Path,
    script: str | Sequence[str],
    *,
    strike: str = "",
    drive: Driver | None = None,
    mode: str = "",
    flags: Sequence[str] = FLAGS,
    env: Mapping[str, str] | None = None,
    calm: Ran | None = None,
) -> Verdict:
    """Run a case disturbed, by STRIKE, by a driver, or both, and compare it with plain PyTorch, or with `calm`.

    A run that is refused with nothing done to it yet is refused undisturbed, and has to be within EARLY steps.
    """
    if calm is None:
        calm = run_calm(work / "calm", script, mode=mode, flags=flags, env=env)
    assert calm.code == 0, f"the undisturbed run ended with {calm.code}\n{calm.output[-4000:]}"
    ran = run_case(work / "disturbed", script, mode=mode, flags=flags, env=env, strike=strike, drive=drive)
    missing = {place.replace(":", "-") for place in strike.split(",") if place} - ran.struck
    assert not (ran.code == 0 and missing), f"never struck: {missing}\n{ran.output[-3000:]}"
    assert not (ran.code == 0 and drive and not ran.resolutions), f"nothing was done to it\n{ran.output[-3000:]}"
    if ran.code in REFUSALS and not ran.struck and not ran.moved:
        assert ran.steps <= EARLY, f"refused after {ran.steps} steps only\n{ran.output[-3000:]}"
    return judge(ran, calm)


_calm: dict[tuple[object, ...], Ran] = {}  # undisturbed runs, for the rest of the session


def run_calm(
    work: Path,
    script: str | Sequence[str],
    *,
    mode: str = "",
    flags: Sequence[str] = FLAGS,
    env: Mapping[str, str] | None = None,
) -> Ran:
    """The ranks of a case without torchrelay, once a session: `protect()` lets a script be there."""
    shape = {flag: int(value) for flag, value in itertools.pairwise(flags) if flag in ("--nodes", "--nproc-per-node")}
    nodes, per_node = shape.get("--nodes", 1), shape["--nproc-per-node"]
    key = (*words_of(script), mode, nodes, per_node, *sorted((env or {}).items()))
    if key not in _calm:
        out = work / "out"
        out.mkdir(parents=True)
        given = environment(out, mode=mode) | {"PAUSE": "0", **(env or {}), "SLOW": "0"}
        ended = run_plain(words_of(script), os.environ | given, work / "plain.out", nodes=nodes, per_node=per_node)
        _calm[key] = Ran(ended.code, ended.output, read_lines(out), frozenset(), work)
    return _calm[key]


def words_of(script: str | Sequence[str]) -> list[str]:
    """`script`: the name of a folder beside this file, or the words of a command."""
    return [str(CASES / script / "train.py")] if isinstance(script, str) else list(script)


def environment(out: Path, *, mode: str, strike: str = "", slow: int = 0) -> dict[str, str]:
    """What `casework` is told."""
    path = os.pathsep.join(filter(None, (str(CASES), os.environ.get("PYTHONPATH", ""))))
    return {"OUT": str(out), "MODE": mode, "STRIKE": strike, "SLOW": str(slow), "PYTHONPATH": path}


def run_case(
    work: Path,
    script: str | Sequence[str],
    *,
    strike: str = "",
    drive: Driver | None = None,
    mode: str = "",
    flags: Sequence[str] = FLAGS,
    env: Mapping[str, str] | None = None,
) -> Ran:
    """One run under torchrelay."""
    out, run_dir = work / "out", work / "run"
    out.mkdir(parents=True)
    given = environment(out, mode=mode, strike=strike, slow=20 if drive else 0)
    process = start_job(run_dir, words_of(script), flags, {**given, **(env or {})})
    case = Case(process, run_dir, out)
    try:
        if drive is not None:
            drive(case)
            case.go()
        stood = not ends(case)
    except BaseException:
        end(process)
        raise
    if stood:
        status = torchrelay("status", "--run-dir", str(run_dir)).stdout
        end(process)
        return Ran(None, f"{case.printed()}\n{status}", read_lines(out), read_struck(out), run_dir)
    done = end_job(process, run_dir, timeout_s=10)
    rows = done.incidents()
    moved = any(row["kind"] == "planned" for row in rows)
    told = tuple(row["resolution"] for row in rows)
    return Ran(done.code, done.output, read_lines(out), read_struck(out), run_dir, told, moved)


def ends(case: Case) -> bool:
    """Wait for the end, as long as ranks write lines; before their first, the run. Returns whether it ended."""
    seen, since = (-1, -1), time.monotonic()
    while case.process.poll() is None:
        lines = sum(path.stat().st_size for path in case.out.glob("rank-*.jsonl"))
        now = lines, 0 if lines else len(case.printed())
        if now != seen:
            seen, since = now, time.monotonic()
        elif time.monotonic() - since > (STANDS_S if lines else BEGINS_S):
            return False
        time.sleep(0.05)
    return True


def end(process: subprocess.Popen[str]) -> None:
    """End a run that is of no more use; nothing of it stays behind."""
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(30)


def read_struck(out: Path) -> frozenset[str]:
    return frozenset(path.name.removeprefix("struck-") for path in out.glob("struck-*"))


def read_lines(out: Path) -> Lines:
    """All that the ranks have written. Of a step that was made again the last line counts."""
    found: Lines = {}
    for path in sorted(out.glob("rank-*.jsonl")):
        rank = int(re.sub(r"\D", "", path.stem))
        for line in path.read_text().splitlines():
            if not line.endswith("}"):
                continue  # its process was killed while it wrote
            row = json.loads(line)
            step = "end" if row.pop("end", False) else str(row.pop("step"))
            found.update({(rank, step, name): json.dumps(value) for name, value in row.items()})
    return found


# ---------------------------------------------------------------- what disturbs from outside


def migrate(rank: int, *, at: int = 20) -> Driver:
    """Move a rank into the spare's place when it has made some steps."""

    def drive(case: Case) -> None:
        case.until_step(at, rank)
        moved(case, "migrate", str(rank), "--reason", "a test")

    return drive


def drain(node: str, *, at: int = 20) -> Driver:
    """Empty a node when some steps are made."""

    def drive(case: Case) -> None:
        case.until_step(at)
        moved(case, "drain", node, "--reason", "a test")

    return drive


def drain_of(rank: int, *, at: int = 20) -> Driver:
    """The same of the node that a rank is on: which one that is, is a matter of whose worker was the first to start."""

    def drive(case: Case) -> None:
        case.until_step(at)
        try:
            held = next(row for row in Client.of(case.run_dir).view_ranks().ranks if row.rank == rank)
        except Away:
            case.until("the end of a run that was refused", lambda: case.process.poll() is not None)
            return
        moved(case, "drain", str(held.node), "--reason", "a test")

    return drive


def moved(case: Case, *order: str) -> None:
    """Give an order that moves ranks, and wait until that is over, well or not."""
    if case.process.poll() is not None:
        return
    told = case.order(*order, "--yes")
    case.until(f"a move after: {told}", lambda: is_over(case))


def is_over(case: Case) -> bool:
    """Whether the run has made a move, and makes none now."""
    try:
        moves = Client.of(case.run_dir).view_moves().moves
    except (Away, Denied, LookupError):
        return False
    return bool(moves) and not any(move.open for move in moves)
