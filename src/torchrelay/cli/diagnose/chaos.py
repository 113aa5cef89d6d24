"""`torchrelay chaos`: faults on the user's own job, on this machine; and how the job gets over them.

It prints what it will do and what should follow as things stand, asks, does it, and waits for the outcome. What was
done is kept in `RUN_DIR/chaos.jsonl`.
"""

from __future__ import annotations

import argparse
import getpass
import json
import random
import re
import signal
import sys
import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from torchrelay.api.shown import IncidentView
from torchrelay.chaos.deeds import Plan, Step, plan_deed
from torchrelay.chaos.faults import Gone
from torchrelay.chaos.leaving import CannotTrace
from torchrelay.chaos.whereabouts import Refusal, Whereabouts
from torchrelay.chaos.wishes import MIX, OF_NODES, Cut, Deed, Facts, How, Outlook, Phase, Wish, draw, outlook
from torchrelay.client.client import Away, Client, Denied
from torchrelay.client.runs import NotPossible, Source, find_run, find_source
from torchrelay.protocol.messages.ids import NodeId, Rank
from torchrelay.protocol.model.incident import UNSETTLED
from torchrelay.schedulers.port import SchedulerError
from torchrelay.terminal.show import Output, milliseconds, table
from torchrelay.terminal.words import positive
from torchrelay.wire.files.launch import read_launch

RECORD = "chaos.jsonl"
LOOK_S = 0.1
CALM_S = 2.0  # how long nothing may be open before a fault that should interrupt nothing counts as got over
RESOLVED_S = 180.0
BACK_S = 60.0
HEARD_MS = 1_500  # a node heard within this time is there
EXAMPLES = """
torchrelay chaos kill --rank 3 --phase gate     when it is in its gate
torchrelay chaos stop --rank 1 --for 20s        and SIGCONT after that
torchrelay chaos exit --rank 1 --code 7
torchrelay chaos slow --rank 2 --factor 3 --for 60s
torchrelay chaos node --node node-1 --how power (torchrelay run --isolate)
torchrelay chaos path --node node-1 --path 2 --for 5s (torchrelay run --isolate --links 2 --net-failover)
torchrelay chaos partition --node node-1 --for 30s
torchrelay chaos any --repeat 10 --every 30s --seed 7

All take --yes, --dry-run, --no-wait, --repeat, --every, --seed, --run-dir, --job and -o json; without --rank or --node
the victim is drawn by chance. Exit code: 0: the job got over it; 1: it did not, or you said no; 2: it cannot be done.
"""
SUMMARY = {
    Deed.KILL: "SIGKILL to a rank's process",
    Deed.STOP: "SIGSTOP to a rank's process: it hangs with its connections open",
    Deed.EXIT: "a rank's process exits by itself, with a code",
    Deed.OOM: "the kernel kills a rank's process for memory (root; else SIGKILL, and it says so)",
    Deed.SLOW: "a rank's process gets a part of the time only",
    Deed.NODE: "a whole node: agent, forkserver and workers killed at once, or its link cut (--how power, --isolate)",
    Deed.PATH: "one network path of a node (--isolate --links): its link down, or packets lost without a word (drop)",
    Deed.PARTITION: "a node's agent and the orchestrator lose each other; the workers do not",
    Deed.AGENT: "SIGKILL to a node's agent alone",
    Deed.ORCHESTRATOR: "SIGKILL to the orchestrator",
    Deed.MEND: "put a cut link up again, end a partition, wake stopped workers of a node",
}


class Result(Struct, frozen=True, kw_only=True):
    """What was done and what came of it; `resolved` None: not waited for."""

    wish: Wish
    at: str
    steps: tuple[Step, ...]
    expects: str
    did: str = ""
    took_s: float | None = None
    resolved: bool | None = None
    after_s: float | None = None  # from the fault until its incidents were resolved, silence included
    outcome: str = ""
    incidents: tuple[IncidentView, ...] = ()


# ---------------------------------------------------------------- the command line


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchrelay chaos",
        description=__doc__,
        epilog=EXAMPLES,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    faults = parser.add_subparsers(dest="deed", metavar="FAULT", required=True)
    made = {
        deed: faults.add_parser(deed, help=text, description=text, allow_abbrev=False) for deed, text in SUMMARY.items()
    }
    made_any = faults.add_parser("any", help=f"one of {', '.join(MIX)}, drawn by chance", allow_abbrev=False)
    for deed, verb in [*made.items(), (None, made_any)]:
        if deed in (Deed.KILL, Deed.STOP, Deed.EXIT, Deed.OOM, Deed.SLOW):
            verb.add_argument("--rank", type=int, metavar="R", help="whom it hits (drawn by chance)")
        if deed in OF_NODES:
            verb.add_argument("--node", metavar="N", help="which node (drawn by chance)")
        if deed in (Deed.STOP, Deed.SLOW, Deed.PARTITION, Deed.NODE, Deed.PATH):
            verb.add_argument("--for", dest="for_s", type=seconds, metavar="TIME", help="how long: 20s, 500ms, 2m")
        if deed in (Deed.KILL, Deed.STOP):
            verb.add_argument(
                "--phase",
                type=phase,
                default=Phase.ANY,
                metavar="PHASE",
                help=f"hit it when it is in this phase: {', '.join(Phase)}",
            )
        add_common(verb)
    made[Deed.EXIT].add_argument("--code", type=int, help="the exit code, 0 to 255 (1)")
    made[Deed.SLOW].add_argument("--factor", type=float, default=2.0, help="it runs 1/FACTOR of the time (2)")
    made[Deed.NODE].add_argument(
        "--how",
        type=How,
        choices=list(How),
        default=How.KILL,
        metavar="{kill,power}",
        help="kill all processes, or cut the network link (kill)",
    )
    made[Deed.PATH].add_argument("--path", type=int, default=1, metavar="K", help="which of its paths, from 1 on (1)")
    made[Deed.PATH].add_argument(
        "--how",
        dest="cut",
        type=Cut,
        choices=list(Cut),
        default=Cut.DOWN,
        metavar="{down,drop}",
        help="its link is down, or packets are lost (down)",
    )
    return parser


def add_common(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--run-dir", type=Path, help="the run's folder (the newest under ./torchrelay-runs)")
    verb.add_argument("--job", help="the job (the newest of the run)")
    verb.add_argument("-y", "--yes", action="store_true", help="do not ask")
    verb.add_argument("--dry-run", action="store_true", help="say what would be done, and what should follow; no more")
    verb.add_argument("--no-wait", action="store_true", help="do not wait for the outcome")
    verb.add_argument("--repeat", type=positive, default=1, metavar="N", help="so many times (1)")
    verb.add_argument("--every", type=seconds, default=30.0, metavar="TIME", help="from one to the next (30s)")
    verb.add_argument("--seed", type=int, help="of what is drawn by chance")
    verb.add_argument(
        "-o",
        "--output",
        type=Output,
        choices=[Output.TABLE, Output.JSON],
        default=Output.TABLE,
        metavar="{table,json}",
        help="how it is printed; json: one object a line",
    )


def phase(text: str) -> Phase:
    """A phase by its name."""
    try:
        return Phase(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no phase: {', '.join(Phase)}") from None


def seconds(text: str) -> float:
    """20, 20s, 500ms, 2m."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m)?", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no time: 20s, 500ms or 2m")
    return float(found[1]) * {"ms": 0.001, "s": 1.0, "m": 60.0, None: 1.0}[found[2]]


def wish_of(given: argparse.Namespace, chance: random.Random) -> Wish:
    """The wish as the command line has it. Raises `NotPossible` for what makes no sense."""
    deed = chance.choice(MIX) if given.deed == "any" else Deed(given.deed)
    code, factor, rank = getattr(given, "code", None), getattr(given, "factor", 2.0), getattr(given, "rank", None)
    if code is not None and not 0 <= code <= 255:
        raise NotPossible(f"--code {code}: an exit code is 0 to 255", 2)
    if factor <= 1:
        raise NotPossible(f"--factor {factor:g}: more than 1", 2)
    node = getattr(given, "node", None)
    return Wish(
        deed=deed,
        rank=None if rank is None else Rank(rank),
        node=None if node is None else NodeId(node),
        phase=getattr(given, "phase", Phase.ANY),
        how=getattr(given, "how", How.KILL),
        code=code,
        for_s=getattr(given, "for_s", None),
        factor=factor,
        path=getattr(given, "path", 1),
        cut=getattr(given, "cut", Cut.DOWN),
    )


def chaos(words: list[str]) -> int:
    """Do it as often as wanted. Returns the exit code: 0, or 1 if the job did not get over it."""
    given = parser().parse_args(words)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was meant to last for a while is undone
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(1 << 30)
    chance = random.Random(seed)
    try:
        session = Session.of(given)
        if given.repeat > 1 and given.output is Output.TABLE:
            print(f"{given.repeat} faults, seed {seed}", flush=True)
        for number in range(given.repeat):
            begin = time.monotonic()
            if not session.strike(draw(wish_of(given, chance), session.facts(), chance)):
                return 1
            if number < given.repeat - 1:
                time.sleep(max(0.0, begin + given.every - time.monotonic()))
    except (Refusal, SchedulerError, CannotTrace) as error:
        raise NotPossible(str(error), 2) from error
    except Gone as error:
        raise NotPossible(f"{error}: nothing was done; look again", 1) from error
    return 0


# ---------------------------------------------------------------- one run


@dataclass
class Session:
    """Faults on one job of one run."""

    where: Whereabouts
    client: Client
    job: str
    given: argparse.Namespace
    sure: bool = field(default=False)
    owed: tuple[str, str] | None = None  # what the audit is still to be told

    @classmethod
    def of(cls, given: argparse.Namespace) -> Session:
        """Raises `Refusal` or `NotPossible` for what is not to be broken."""
        run_dir = find_run(given.run_dir)
        where = Whereabouts.of(run_dir)
        client = Client.of(run_dir)
        job = client.job(given.job)
        if job.outcome is not None or job.phase in ("finishing", "ending", "ended"):
            raise NotPossible(f"{job.job} is {job.phase}: there is nothing left to break", 2)
        return cls(where, client, job.job, given, sure=given.yes)

    def facts(self) -> Facts:
        paths = read_launch(self.where.run_dir).paths
        down_s = None if paths is None else paths.down_s
        return Facts(self.client.job(self.job), self.client.view_ranks(self.job), down_s)

    def strike(self, wish: Wish) -> bool:
        """Plan, show, ask, do, wait, tell. False if the job did not get over it."""
        facts = self.facts()
        plan, expects = plan_deed(wish, facts, self.where), outlook(wish, facts)
        result = Result(wish=wish, at=now(), steps=plan.steps, expects=expects.text)
        if self.given.output is Output.TABLE:
            print(plan_page(plan, expects), flush=True)
        if self.given.dry_run:
            self.tell(result)
            return True
        self.ask()
        known = len(self.client.view_incidents(self.job).incidents)
        begin = time.monotonic()
        did = self.act(plan)
        done = time.monotonic()
        self.record(result, did)
        result = msgspec.structs.replace(result, did=did, took_s=round(done - begin, 3))
        if not self.given.no_wait:
            result = self.outcome(result, expects, known)
            self.give_note()
            if result.incidents:
                since = begin if plan.lasts_s is not None else done
                result = msgspec.structs.replace(result, after_s=round(time.monotonic() - since, 2))
        self.tell(result)
        return result.resolved is not False

    def ask(self) -> None:
        """Once, on a terminal. Raises `NotPossible` without a yes."""
        if self.sure:
            return
        if not sys.stdin.isatty():
            raise NotPossible("nothing was done: add --yes where there is no terminal to ask on, or --dry-run", 2)
        if input("do it? [y/N] ").strip().lower() not in ("y", "yes"):
            raise NotPossible("nothing was done", 1)
        self.sure = True

    def act(self, plan: Plan) -> str:
        """Do it; if it is to last for a while, wait and undo it, whatever happens meanwhile."""
        try:
            told = plan.act()
            if plan.lasts_s is not None:
                time.sleep(plan.lasts_s)
                told = f"{told}; ended after {plan.lasts_s:g} s"
        finally:
            if plan.lasts_s is not None:
                plan.undo()
        return told

    def record(self, result: Result, did: str) -> None:
        """One line in the run's folder, and one in the orchestrator's audit if it keeps one."""
        said = {"at": result.at, "who": getpass.getuser(), "did": did, **msgspec.to_builtins(result.wish)}
        said["steps"] = msgspec.to_builtins(result.steps)
        with (self.where.run_dir / RECORD).open("a") as file:
            file.write(json.dumps(said) + "\n")
        what = "; ".join(f"{step.what} (process {step.pid})" if step.pid else step.what for step in result.steps)
        self.owed = (f"chaos {result.wish.deed}", what)
        self.give_note()

    def give_note(self) -> None:
        """Tell the audit what was done, if that is still owed: it may be the orchestrator that was hit."""
        if self.owed is None:
            return
        try:
            self.client.note(*self.owed)
        except (Away, Denied):
            return  # the file has it
        self.owed = None

    # ------------------------------------------------------------ the outcome

    def outcome(self, result: Result, expects: Outlook, known: int) -> Result:
        """Wait for it."""
        until = time.monotonic() + (RESOLVED_S if expects.incident else BACK_S)
        calm_since: float | None = None
        while time.monotonic() < until:
            time.sleep(LOOK_S)
            try:
                seen = self.live_or_ended()
                incidents, job = seen.view_incidents(self.job).incidents[known:], seen.job(self.job)
                back = job.outcome is not None or self.is_back(result.wish)
            except (Away, Denied):
                calm_since = None
                continue
            ended = job.outcome is not None
            still = bool(incidents) or not expects.incident
            if ended or (still and back and all(one.resolution not in UNSETTLED for one in incidents)):
                calm_since = calm_since if calm_since is not None else time.monotonic()
                enough = ended or (expects.incident and bool(incidents)) or time.monotonic() - calm_since >= CALM_S
                if enough:
                    return resolved(
                        result,
                        expects,
                        incidents,
                        ""
                        if not ended or job.outcome is None
                        else f"the job ended with {job.outcome.code}: {job.outcome.reason}",
                    )
            else:
                calm_since = None
        wanted = "no incident was seen to its end" if expects.incident else "not all was back"
        return msgspec.structs.replace(result, resolved=False, outcome=f"{wanted} in time: see `torchrelay status`")

    def live_or_ended(self) -> Source:
        """What tells of the run. Raises `Away` while its orchestrator is away, and `Denied`.

        One that has ended may be gone before it is asked: then its journal has the outcome, and nothing else ever will.
        """
        try:
            self.client.job(self.job)
        except Away:
            source, _ = find_source(self.where.run_dir)
            if source.job(self.job).outcome is None:
                raise
            return source
        return self.client

    def is_back(self, wish: Wish) -> bool:
        """Whether the node that was hit is heard again, where it should be."""
        if wish.node is None or (wish.how is How.POWER and wish.for_s is None):
            return True
        nodes = {str(node.node): node for node in self.client.view_status().nodes}
        node: Any = nodes.get(wish.node)
        return node is not None and node.alive and node.silent_ms is not None and node.silent_ms < HEARD_MS

    def tell(self, result: Result) -> None:
        """One object a line, or what there is to read."""
        if self.given.output is Output.JSON:
            print(msgspec.json.encode(result).decode(), flush=True)
        elif result.did:
            print(outcome_page(result), flush=True)


def resolved(result: Result, expects: Outlook, incidents: tuple[IncidentView, ...], end: str) -> Result:
    """The result with its outcome in words."""
    clean = not end and all(one.resolution == "clean" for one in incidents)
    if end:
        told = end
    elif incidents:
        told = "; ".join(one.summary for one in incidents)
    else:
        told = "no incident" if not expects.incident else "nothing came of it"
    return msgspec.structs.replace(result, resolved=clean, outcome=told, incidents=incidents)


# ---------------------------------------------------------------- pages


def plan_page(plan: Plan, expects: Outlook) -> str:
    rows = [(step.what, step.pid, step.node, step.worker) for step in plan.steps]
    return f"{table(('what', 'pid', 'node', 'worker'), rows)}\nexpected: {expects.text}"


def outcome_page(result: Result) -> str:
    """What was done, how it was resolved, and the time of each phase."""
    lines = [f"done: {result.did}"]
    if result.outcome:
        after = "" if result.after_s is None else f" ({result.after_s:g} s after it was done)"
        lines.append(f"outcome{after}: {result.outcome}")
    for incident in result.incidents:
        phases = ", ".join(f"{name} {milliseconds(took)}" for name, took in incident.phases.items())
        lines.append(f"{incident.name}: {phases}" if phases else f"{incident.name}: {incident.resolution}")
        lines.append(f"`torchrelay explain {incident.name}` tells it in full")
    return "\n".join(lines)


def now() -> str:
    return datetime.now().astimezone().isoformat(timespec="milliseconds")
