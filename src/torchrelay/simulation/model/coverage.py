"""Coverage: what the seeds have reached, and what they must reach, lest the worlds be too tame."""

from __future__ import annotations

from collections import Counter

from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages import orders as od
from torchrelay.protocol.messages.orders import Verdict
from torchrelay.protocol.model.incident import Resolution
from torchrelay.protocol.model.job import MOVING, RECOVERING, JobPhase
from torchrelay.protocol.model.moves import OPEN_MOVES, MoveState
from torchrelay.protocol.recovery.ending import NO_SPARE, NO_STATE, REFUSED, STOPPED
from torchrelay.simulation.model.plans import FaultKind, Lack, Plan

# Faults that find something to hit in every phase of a recovery.
ENOUGH = 3_000  # so many seeds must reach everything,
ENOUGH_FOR_PHASES = 10_000  # and so many these faults in every phase of a recovery, some of which last for milliseconds
EVERYWHERE = (FaultKind.KILL, FaultKind.TWO, FaultKind.ORCHESTRATOR, FaultKind.AGENT, FaultKind.SPLIT, FaultKind.POWER)
# Left to chance: a call-off lasts for milliseconds, and 100,000 seeds have not met it with both ranks still there.
BY_CHANCE = (FaultKind.TWO, JobPhase.RELEASING)

# Faults of those who change hands, and when they can be hit as such.
OF_MOVES = (FaultKind.KILL_TARGET, FaultKind.KILL_OUTGOING)
HALTS = (JobPhase.RUNNING, JobPhase.QUIESCING, JobPhase.HALTING)


# A signal that is to be passed on to the script: shown by unit tests and real processes only, so far.
NOT_SIMULATED = {"order: PassOn", "event: SignalAsked"}


def required(seeds: int) -> list[str]:
    """Everything that some of so many seeds must reach."""
    if seeds < ENOUGH:
        return []
    wanted = [f"phase: {phase}" for phase in JobPhase if phase is not JobPhase.STARTING]
    wanted += [f"verdict: {verdict}" for verdict in Verdict if verdict is not Verdict.GO_ON]  # that is of each move
    wanted += [f"move: {state}" for state in MoveState if state not in OPEN_MOVES]
    wanted += [f"resolution: {resolution}" for resolution in Resolution if resolution is not Resolution.OPEN]
    codes = (0, Plan.script_code, NO_SPARE, NO_STATE, REFUSED, STOPPED, 137)
    wanted += [f"outcome: {code}" for code in codes]
    wanted += [f"fault: {kind}" for kind in FaultKind]
    if seeds >= ENOUGH_FOR_PHASES:
        places = [(kind, phase) for kind in EVERYWHERE for phase in sorted(RECOVERING | MOVING)]
        wanted += [f"fault: {kind} in {phase}" for kind, phase in places if (kind, phase) != BY_CHANCE]
        wanted += [f"fault: {kind} in {phase}" for kind in OF_MOVES for phase in HALTS]
    wanted += [f"lack: {lack}" for lack in Lack]
    wanted += [f"order: {kind.__name__}" for kind in od.Order.__subclasses__() if kind is not od.WorkerOrder]
    wanted += [f"order: {kind.__name__}" for kind in od.WorkerOrder.__subclasses__()]
    wanted += [f"event: {kind.__name__}" for kind in (*ev.Fact.__subclasses__(), *ev.Answer.__subclasses__())]
    return [what for what in wanted if what not in NOT_SIMULATED]


def missing(reached: Counter[str], seeds: int) -> list[str]:
    """What so many seeds must reach, and did not."""
    return [what for what in required(seeds) if not reached[what]]


def table(reached: Counter[str]) -> str:
    """What was reached how often; faults by the phase in which they struck."""
    lines = []
    for family in ("outcome", "resolution", "move", "verdict", "order", "event", "lack"):
        found = sorted(
            (what, n) for what, n in reached.items() if what.startswith(f"{family}: ") and " in " not in what
        )
        lines.append(f"{family:10} " + ", ".join(f"{what.removeprefix(f'{family}: ')} {n}" for what, n in found))
    phases = list(JobPhase)
    lines.append("")
    lines.append(f"{'fault, struck in':48}" + "".join(f"{phase[:8]:>9}" for phase in phases) + f"{'all':>9}")
    for kind in FaultKind:
        cells = "".join(f"{reached[f'fault: {kind} in {phase}']:9}" for phase in phases)
        lines.append(f"{kind:48}{cells}{reached[f'fault: {kind}']:9}")
    return "\n".join(lines)
