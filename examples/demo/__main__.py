"""Train a GPT twice, in peace and under faults from outside, and compare the two runs bit by bit.

    python -m examples.demo

Exit code 0: every bit equal, every strike in the ledger, every incident resolved clean. 1: not so, and the report says
what. 3: training was over before all faults had come, twice: the machine is too busy. 130: interrupted. Writes
demo-report.json and demo-report.png; the runs' own files stay under torchrelay-runs/.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from examples.demo.bits import Trace, compare, read, step_seconds
from examples.demo.display import Display, Moment, display_on
from examples.demo.orders import OrderRefused, carry_out
from examples.demo.picture import draw
from examples.demo.report import IncidentLine, Struck, match, shortfalls, tables_of, write
from examples.demo.watch import Job, Seen, Tail
from torchrelay.chaos.faults import Gone, observe, strike
from torchrelay.chaos.story import Act, Facts, Story, Strike, parse
from torchrelay.protocol.model.incident import UNSETTLED

EXAMPLES = Path(__file__).parent.parent
RANKS = 4
NODES = 2  # virtual nodes with two ranks each; the disturbed run has a third one, for two spares
SPARES = 2
PLAIN_WIDTH = 120  # of what is printed where there is no terminal
LOOK_S = 0.2  # between two looks at a run
UNTOLD = 3  # exit code: the story was not told to its end


@dataclass
class Run:
    """One run of the demonstration: its place, its faults, and what has been seen of it."""

    title: str
    folder: Path
    story: Story
    spare_nodes: int
    struck: list[Struck] = field(default_factory=list)
    news: list[str] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    resolved: set[str] = field(default_factory=set)

    @property
    def digests(self) -> Path:
        return self.folder / "digests"

    @property
    def written(self) -> Path:
        return self.folder / "losses"

    def start(self, args: argparse.Namespace) -> Job:
        self.digests.mkdir(parents=True)
        flags = ["--nodes", str(NODES), "--nproc-per-node", str(RANKS // NODES), "--slot-faults", "0"]
        flags += ["--spare-nodes", str(self.spare_nodes), "--job", f"demo-{self.title}"]
        script = [str(EXAMPLES / "train_gpt.py"), "--losses", str(self.written)]
        script += ["--epochs", str(args.epochs), "--epoch-steps", str(args.epoch_steps)]
        return Job(self.folder / "run", flags, script, self.digests)

    def play(self, job: Job, display: Display, total: int, deadline_s: float) -> None:
        """Watch the run until it ends or its time is over, striking when the story says so."""
        begin, tail = time.monotonic(), Tail(self.written / "rank-0.jsonl")
        while not job.ended():
            seconds = time.monotonic() - begin
            if seconds > deadline_s:
                self.news.append(f"no end within {deadline_s:.0f} s: it is stopped")
                display.show(self.moment(job.look(), total, seconds))
                return
            self.losses += [float.fromhex(line["loss"]) for line in tail.read() if "loss" in line]
            seen = job.look()
            if seen is not None:
                self.act(seen, job)
            display.show(self.moment(seen, total, seconds))
            time.sleep(LOOK_S)

    def act(self, seen: Seen, job: Job) -> None:
        """Strike if it is time, and note what has been resolved."""
        facts = seen.facts()
        due = self.story.advance(facts)
        if due is not None and not self.strike(due, facts, job):
            self.story.told -= 1  # a victim had just ended by itself: the strike is due again when all train
        for incident in seen.incidents:
            if incident["resolution"] not in UNSETTLED and incident["name"] not in self.resolved:
                self.resolved.add(incident["name"])
                self.news.append(incident["summary"])

    def strike(self, due: Strike, facts: Facts, job: Job) -> bool:
        """Carry it out, False if one of its victims was not there any more."""
        if isinstance(due.fault, Act) or due.within:
            at = time.time()
            try:
                told = carry_out(due, facts, job.run_dir)
            except OrderRefused:
                if not due.within:
                    raise
                return False  # its victim has ended since it was seen, or has only just begun
            self.struck.append(Struck(due, facts.step or 0, at, due.hits(facts)))
            self.news.append(f"at step {facts.step}: $ {told}")
            return True
        try:
            victims = [observe(facts.pids[rank]) for rank in due.ranks]
            at = time.time()
            for victim in victims:
                strike(victim, due.fault)
        except Gone:
            return False
        self.struck.append(Struck(due, facts.step or 0, at, due.ranks))
        who = ", ".join(f"rank {rank} (process {facts.pids[rank]})" for rank in due.ranks)
        self.news.append(f"strike at step {facts.step}: {due.fault} {who}")
        return True

    def moment(self, seen: Seen | None, total: int, seconds: float) -> Moment:
        """What is to be seen now; little while there is nobody to ask."""
        plain = Moment(title=self.title, step=0, total=total, seconds=seconds, phase="starting", news=self.news)
        if seen is None:
            return plain
        holders = [row for row in seen.ranks if row["rank"] is not None]
        return replace(
            plain,
            step=seen.status["step"] or 0,
            phase=seen.status["phase"],
            losses=self.losses,
            ranks=[(row["rank"], "hanging" if row["process"] == "T" else row["state"], row["pid"]) for row in holders],
            spares=seen.status["spares"]["warm"],
        )

    def trace(self) -> Trace:
        return read(self.digests, self.written)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make demo", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--epoch-steps", type=int, default=100)
    parser.add_argument("--story", type=Path, default=Path(__file__).parent / "story.txt", help="the faults")
    parser.add_argument("--out", type=Path, default=Path(), help="folder for demo-report.json and demo-report.png")
    parser.add_argument("--runs", type=Path, default=Path("torchrelay-runs"), help="folder for what the runs leave")
    parser.add_argument("--deadline", type=float, default=180.0, help="seconds that each of the two runs may take")
    return parser.parse_args()


def perform(act: Run, args: argparse.Namespace, console: Console) -> tuple[int, list[IncidentLine]]:
    """Play one run to its end; its exit code and its incidents. Nothing of it is left running."""
    job = act.start(args)
    try:
        with display_on(console) as display:
            act.play(job, display, args.epochs * args.epoch_steps, args.deadline)
    finally:
        code = job.end()
    if code != 0:
        console.print(f"the {act.title} run ended with {code}; the end of {job.log}:", style="red")
        console.print("\n".join(job.log.read_text().splitlines()[-25:]), markup=False, highlight=False)
    trace = act.trace()
    return code, match(job.ledger(), act.struck, trace, step_seconds(trace))


def main() -> int:
    args, console = arguments(), Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    code = demonstrate(args, console)
    if code == UNTOLD:
        args.epochs, args.deadline = 2 * args.epochs, 2 * args.deadline
        console.print(f"once more, with {args.epochs} epochs, so that there is time for all of them", style="yellow")
        code = demonstrate(args, console)
    return code


def demonstrate(args: argparse.Namespace, console: Console) -> int:
    """Both runs, and what they show; the exit code."""
    begin = time.monotonic()
    folder = args.runs / time.strftime("demo-%Y%m%d-%H%M%S")
    calm = Run("undisturbed", folder / "undisturbed", Story(()), spare_nodes=0)
    rough = Run("disturbed", folder / "disturbed", parse(args.story.read_text()), spare_nodes=1)
    calm_code, _ = perform(calm, args, console)
    rough_code, incidents = perform(rough, args, console)

    before, after = calm.trace(), rough.trace()
    comparison = compare(before, after)
    failed = shortfalls(comparison, incidents, rough.story, (calm_code, rough_code))
    step_s, seconds = step_seconds(before), time.monotonic() - begin
    write(
        args.out / "demo-report.json",
        comparison,
        incidents,
        failed=failed,
        seconds=round(seconds, 1),
        step_s=round(step_s, 4),
        ranks=RANKS,
        spares=SPARES,
        steps=args.epochs * args.epoch_steps,
        runs=str(folder),
    )
    draw(args.out / "demo-report.png", before, after, incidents, comparison.bit_equal)
    for table in tables_of(incidents):
        console.print(table)
    told = f"{comparison.digests} states, {comparison.losses} losses and {comparison.parameters} final models compared"
    console.print(f"{told}: {'equal to the last bit' if comparison.bit_equal else 'NOT equal'} ({seconds:.0f} s)")
    for line in failed:
        console.print(f"failed: {line}", style="red", markup=False)
    ledger = f"{Path(sys.executable).parent / 'torchrelay'} report --run-dir {rough.folder / 'run'}"
    console.print(f"its ledger: {ledger}", markup=False, highlight=False, soft_wrap=True)
    left = rough.story.strikes[rough.story.told :]
    if left:
        told = ", ".join(str(one) for one in left)
        console.print(f"training was over before these had come (the machine is slow, or busy): {told}", style="yellow")
    if failed:
        return 1
    return UNTOLD if left else 0


if __name__ == "__main__":
    for signum in (signal.SIGTERM, signal.SIGHUP):
        # An exit like any other: the run that is under way is stopped on the way out.
        signal.signal(signum, lambda number, _: sys.exit(128 + number))
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
