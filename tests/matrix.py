"""The matrix of faults and phases on real processes: what `make test` covers, and what `make soak` goes through.

python -m tests.matrix --all                 every cell once: faults x phases, and who x when inside a move
python -m tests.matrix --minutes 60          faults and moves by chance for an hour, then what was covered
python -m tests.matrix --faults 300          so many in a row
python -m tests.matrix --job 4711            one job of these again, as its seed has it
python -m tests.matrix --silent              scripts that break a rule on purpose: nothing wrong may come of it silently

Acts are done to jobs that train, several to each; each job is then compared with its undisturbed twin, bit by bit at
every point on every rank. Exit code 1: something was wrong; what was left of that job is kept.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support import silent
from tests.support.acts import EVERY, IMPOSSIBLE, MOVES, OUTER, POSSIBLE, WHENS, WHOS, Act, Inside, Strike
from tests.support.cells import ALL, HOWS, PHASES, SECONDS, Cell
from tests.support.jobs import SCRIPTS, Finished, differences, run_job
from tests.support.live import RANKS, Live, Twin, doubled
from tests.support.twins import undisturbed

STRIDE = 7  # steps between two faults: epochs are 25 steps, so every safepoint is met
FLAGS = ["--probation", "3s"]
# Of tests/scripts/layouts.py, those in which any one rank may be lost.
LAYOUTS = ("ddp", "hsdp", "tp", "pp", "pp-gpipe", "pp-interleaved", "pp-hsdp", "ddp-rich", "hsdp-rich")
MAX_BAD = 5  # jobs that went wrong, after which no further one is begun
FINE = ("clean", "called off")


def plan_of(cells: list[Cell], chance: random.Random) -> tuple[list[dict[str, Any]], int]:
    """A plan for the script, one cell after the other, and how many steps it needs."""
    plan: list[dict[str, Any]] = []
    step = 4
    for number, cell in enumerate(cells):
        rank = chance.randrange(RANKS)
        if cell.phase == "section":
            step += -step % 25  # sections are at the ends of epochs, after 25 steps
        fault = {"id": f"f{number}", "ranks": [rank], "step": step, "phase": cell.phase, "how": cell.how}
        plan.append(fault)
        if cell.second:
            other = (rank + 1 + chance.randrange(RANKS - 1)) % RANKS
            ranks = [rank] if cell.second in ("catch up", "restore") else [other]
            second = {"id": f"s{number}", "ranks": ranks, "phase": cell.second, "how": "kill", "after": f"f{number}"}
            plan.append(second)
        step += STRIDE
    return plan, step + 3


def run_cells(
    work: Path, name: str, cells: list[Cell], seed: int, *, layout: str = "ddp", timeout_s: float = 600
) -> Finished:
    """One job that meets all these faults, one after the other."""
    plan, steps = plan_of(cells, random.Random(seed))
    marks = work / f"{name}-marks"
    marks.mkdir()
    plan_file = work / f"{name}-plan.json"
    plan_file.write_text(json.dumps(plan))
    script = [str(SCRIPTS / "faulty.py"), "--layout", layout, "--steps", str(steps)]
    script += ["--plan", str(plan_file), "--marks", str(marks)]
    flags = ["--nproc-per-node", str(RANKS), "--spares", "2", "--slot-faults", "0"]
    done = run_job(work / name, script, flags, timeout_s=timeout_s)
    struck = {path.name.split(".")[0] for path in marks.iterdir()}
    missing = {fault["id"] for fault in plan} - struck
    assert not missing, f"faults that never struck: {missing} of {plan}\n{done.output[-3000:]}"
    return done


def run_undisturbed(cells: list[Cell], seed: int, *, layout: str = "ddp") -> Finished:
    """The same without faults."""
    _, steps = plan_of(cells, random.Random(seed))
    return undisturbed([str(SCRIPTS / "faulty.py"), "--layout", layout, "--steps", str(steps)], world=RANKS)


def verdict(done: Finished, calm: Finished) -> list[str]:
    """What is wrong with a disturbed run; empty if nothing is."""
    wrong = [] if done.code == 0 else [f"exit code {done.code}: {done.output[-2000:]}"]
    wrong += differences(done, calm)[:10]
    wrong += [f"{row['id']} ({row['cause']}): {row['resolution']}" for row in unclean(done)]
    return wrong


def unclean(done: Finished) -> list[dict[str, Any]]:
    return [row for row in done.incidents() if row["resolution"] != "clean"]


def lost_in(done: Finished) -> int:
    """How many ranks were lost (of an incident without any: 1). A busy machine may make one incident of two faults."""
    return sum(max(1, len(row["ranks"])) for row in done.incidents())


# ---------------------------------------------------------------- jobs that a driver breaks


@dataclass
class Tally:
    """What was done, and what was wrong."""

    acts: Counter[str] = field(default_factory=Counter)
    moves: Counter[str] = field(default_factory=Counter)  # by how they ended
    incidents: Counter[str] = field(default_factory=Counter)
    jobs: int = 0
    points: int = 0
    bad: list[str] = field(default_factory=list)

    @property
    def done(self) -> int:
        return sum(self.acts.values())


def goes_home(seed: int) -> bool:
    """Whether in this job ranks return by themselves to where they began."""
    return seed % 5 == 0


def draw(seed: int, count: int) -> list[Act]:
    """The acts of one job, cells by chance; some of them SIGSTOP, not SIGKILL.

    Where ranks move by themselves nothing can be aimed at a phase of a certain move.
    """
    chance = random.Random(seed)
    acts: list[Act] = []
    for _ in range(count):
        weights = (4, 0, 4, 1) if goes_home(seed) else (4, 5, 3, 1)
        kind = chance.choices(("strike", "inside", "move", "outer"), weights)[0]
        if kind == "strike":
            acts.append(Strike(chance.choice(ALL + SECONDS)))
        elif kind == "inside":
            cell = chance.choice(POSSIBLE)
            stopped = cell.who in ("source", "bystander") and chance.random() < 0.2
            acts.append(Inside(cell.who, cell.when, "stop") if stopped else cell)
        else:
            acts.append(chance.choice(MOVES) if kind == "move" else chance.choice(OUTER))
    return acts


def go_through(
    acts: list[Act], seed: int, twin: Twin, tally: Tally, again: str = "", *, home: bool = False
) -> list[str]:
    """One job and its undisturbed twin. Returns what was wrong. `again`: the words to repeat it with."""
    work = Path(tempfile.mkdtemp(prefix=f"torchrelay-soak-{seed}-"))
    live: Live | None = None
    wrong: list[str] = []
    begin = time.monotonic()
    act: Act | str = "the start"
    try:
        live = Live.begin(work, seed, FLAGS, home=home, layout=twin.layout)
        for act in acts:
            act.do(live)
            tally.acts[str(act)] += 1
        act = "the end"
        look = live.settled()
        if home:
            look = live.until("all ranks at home", lambda now: now.well and live.at_home(now))
            tally.moves["returns home, of all"] += sum("returns home" in move.reason for move in look.moves)
        tally.moves.update(move.state for move in look.moves)
        wrong += compare(live.end(), twin, work, tally)
    except Exception as error:  # noqa: BLE001  whatever it is, the next job comes, and the end tells of this one
        wrong.append(f"in {act}: {error}" if isinstance(error, AssertionError) else traceback.format_exc())
    finally:
        if live is not None:
            wrong += dict.fromkeys(live.wrong)
            live.kill()
    tally.jobs += 1
    if wrong:
        tally.bad.append(f"job {seed}, kept in {work}: {wrong[0][:300]}\n    again: {again}")
    else:
        remove(work)
    told = "clean, bit-equal" if not wrong else "\n".join(wrong)
    print(f"{tally.done:5} acts, job {seed}, {time.monotonic() - begin:.0f} s: {told}", flush=True)
    return wrong


def compare(done: Finished, twin: Twin, work: Path, tally: Tally) -> list[str]:
    """The bits, the owners and the ledger of a job that has ended."""
    wrong = [] if done.code == 0 else [f"exit code {done.code}: {done.output[-2000:]}"]
    wrong += twin.differences(done)[:10]
    wrong += doubled(work / "run-digests")
    rows = done.incidents()
    wrong += [f"{row['id']} ({row['cause']}): {row['resolution']}" for row in rows if row["resolution"] not in FINE]
    tally.incidents.update(f"{row['kind']}, {row['resolution']}" for row in rows)
    tally.points += len(done.digests)
    return wrong


def remove(folder: Path) -> None:
    """A job that was fine leaves nothing behind."""
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    folder.rmdir()


# ---------------------------------------------------------------- what was covered


def print_cover(tally: Tally) -> None:
    """The matrices: how often each cell was struck."""
    print("\n" + " " * 8 + "".join(f"{phase:>10}" for phase in PHASES))
    for how in HOWS:
        cells = [str(tally.acts[str(Cell(how, phase))]) if Cell(how, phase) in ALL else "-" for phase in PHASES]
        print(f"{how:8}" + "".join(f"{cell:>10}" for cell in cells))
    for cell in SECONDS:
        print(f"{tally.acts[str(cell)]:5}  {cell}")
    print("\ninside a move" + " " * 3 + "".join(f"{when:>13}" for when in WHENS))
    for who in WHOS:
        row = ["-" if (who, when) in IMPOSSIBLE else str(inside(tally, who, when)) for when in WHENS]
        print(f"{who:16}" + "".join(f"{cell:>13}" for cell in row))
    for (who, when), why in IMPOSSIBLE.items():
        print(f"    -  {who} while {when}: {why}")
    print()
    for act in [*MOVES, *OUTER]:
        print(f"{tally.acts[str(act)]:5}  {act}")
    moves = ", ".join(f"{count} {state}" for state, count in sorted(tally.moves.items()))
    incidents = ", ".join(f"{count} {what}" for what, count in sorted(tally.incidents.items()))
    print(f"\n{tally.done} faults and moves in {tally.jobs} jobs on 3 nodes of 2; {tally.points} points compared")
    print(f"moves: {moves or 'none'}\ninterruptions: {incidents or 'none'}\n{len(tally.bad)} violations")
    for bad in tally.bad:
        print(f"  {bad}")


def inside(tally: Tally, who: str, when: str) -> int:
    return sum(tally.acts[name] for name in {str(Inside(who, when, how)) for how in ("kill", "stop")})


def slices(acts: Sequence[Act], seed: int, per_job: int) -> list[list[Act]]:
    """All of them once, in an order by chance."""
    mixed = list(acts)
    random.Random(seed).shuffle(mixed)
    return [mixed[first : first + per_job] for first in range(0, len(mixed), per_job)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every cell once")
    parser.add_argument("--inside", action="store_true", help="every cell inside a move once")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--faults", type=int, help="so many faults and moves, however long it takes")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--per-job", type=int, default=15, help="acts in one job")
    parser.add_argument("--layout", choices=LAYOUTS, default="ddp", help="how the ranks share the model")
    parser.add_argument("--job", type=int, metavar="SEED", help="this job alone, again")
    parser.add_argument("--silent", nargs="*", metavar="RULE", help="scripts that break a rule on purpose, or these")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # jobs do not outlive us
    if options.silent is not None:
        return silent.main(options.silent)
    tally = Tally()
    twin = Twin(options.layout)
    try:
        for seed, acts, words in jobs(options, tally):
            again = f"python -m tests.matrix {words} --per-job {options.per_job} --layout {options.layout}"
            home = goes_home(seed) and not (options.all or options.inside)
            go_through(acts, seed, twin, tally, again, home=home)
    except KeyboardInterrupt:
        tally.bad.append("cut short by a signal")
    print_cover(tally)
    return 1 if tally.bad else 0


def jobs(options: argparse.Namespace, tally: Tally) -> Iterator[tuple[int, list[Act], str]]:
    """The jobs that are to be done, each with its seed, and the words that repeat it."""
    if options.job is not None:
        yield options.job, draw(options.job, options.per_job), f"--job {options.job}"
        return
    chance = random.Random(options.seed)
    print(f"seed {options.seed}", flush=True)
    if options.all or options.inside:
        for acts in slices(EVERY if options.all else POSSIBLE, options.seed, options.per_job):
            which = "--all" if options.all else "--inside"
            yield chance.randrange(1 << 30), acts, f"{which} --seed {options.seed}"
        return
    until = time.monotonic() + 60 * options.minutes
    while tally.done < options.faults if options.faults is not None else time.monotonic() < until:
        if len(tally.bad) > MAX_BAD:
            return
        seed = chance.randrange(1 << 30)
        left = options.per_job if options.faults is None else min(options.per_job, options.faults - tally.done)
        yield seed, draw(seed, left), f"--job {seed}"


if __name__ == "__main__":
    sys.exit(main())
