"""Plans: what one seed draws. The job, its script, the cluster, the weather, and which faults strike when.

A seed first draws which kinds of fault exist at all, so that some worlds know only kills and others everything.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from random import Random

import msgspec

from torchrelay.protocol.messages.enclosed import JobSpec, Resumed
from torchrelay.protocol.messages.ids import JobId, WorkerPhase
from torchrelay.protocol.model.job import JobPhase
from torchrelay.simulation.model.script import Script, ScriptError


@dataclass(frozen=True)
class Weather:
    """How messages travel. Times in ms, chances from 0 to 1."""

    latency_ms: tuple[int, int] = (1, 3)
    late: float = 0.0  # chance that a message takes up to late_ms
    late_ms: int = 600
    lost: float = 0.0
    doubled: float = 0.0
    reordered: bool = False


JOB = JobId("job")
STEP, SECTION = WorkerPhase.COMPUTING, WorkerPhase.SECTION


class FaultKind(StrEnum):
    """Everything that can go wrong by itself. What a plan forbids (spares, replicas) is a `Lack`."""

    KILL = "SIGKILL of a rank"
    EXIT = "os._exit of a rank"
    RAISE = "exception of a rank, once"
    STOP = "SIGSTOP of a rank, for ever"
    PAUSE = "SIGSTOP of a rank that wakes up again"
    HANG = "a rank's main thread hangs"
    STUCK = "a rank does not come out of a collective that was broken"
    TWO = "SIGKILL of two ranks at once"
    KILL_REPLACEMENT = "SIGKILL of a replacement"
    KILL_SPARE = "SIGKILL of a spare"
    STOP_SPARE = "SIGSTOP of a spare"
    CUT = "a connection breaks, nobody is lost"
    RECONFIGURE_BREAKS = "connecting fails"
    NEVER_RECONFIGURES = "connecting fails again and again"
    RESTORE_BREAKS = "a source does not deliver"
    MISMATCH = "a digest differs"
    AGENT = "an agent crashes and returns"
    SPLIT = "a node is split from the orchestrator for a moment"
    LONG_SPLIT = "a node is split from the orchestrator for long"
    DEAF = "no node reaches the orchestrator for a while"
    POWER = "a node is lost"
    RACK = "many nodes are lost at once"
    ORCHESTRATOR = "the orchestrator crashes and returns"
    UNDYING = "a rank hangs in the kernel and cannot be ended"
    CANCEL = "the operator stops the job"
    MOVE = "the operator moves a rank"
    MOVE_TWO = "the operator moves two ranks"
    MOVE_AND_BACK = "the operator moves a rank and thinks better of it"
    TAINT = "a slot is tainted, for a while"
    DRAIN = "a node is drained, and undrained"
    FREEZE = "the operator freezes the job for a while"
    KILL_TARGET = "SIGKILL of the target of a move"
    STOP_TARGET = "SIGSTOP of the target of a move"
    DOOMED_TARGETS = "targets of moves die while they are prepared, one after the other"
    KILL_OUTGOING = "SIGKILL of a worker that is to leave, or has left"
    FLIP = "a bit flips in what a rank holds"
    PARK = "the job is to park"
    HEAD = "the node of the orchestrator is lost"
    FROZEN = "the orchestrator's process is stopped, and wakes up"
    HALVES = "the network is split into two halves"
    HEIR = "an heir's node is lost"
    HEIR_PROCESS = "an heir's process ends"


class Lack(StrEnum):
    """What a world lacks, or a script does, from its beginning."""

    SPARES = "no spare"
    REFILL = "no refill"
    SLOTS = "slots are cordoned at the first fault"
    REPLICAS = "no replicas"
    HYBRID = "two shards"
    SLOW = "workers that start slowly"
    ERROR_ON_ONE = "an error of the script on one rank"
    ERROR_ON_ALL = "an error of the script on all ranks"
    UNDECLARED = "collectives between steps"
    REFUSED = "a script that is refused"
    SECTIONS = "sections"
    RESTARTS = "restarts from the script's own checkpoint"
    LATE = "late messages"
    LOST = "lost messages"
    DOUBLED = "doubled messages"
    REORDERED = "reordered messages"


class On(StrEnum):
    """What a strike waits for."""

    TIME = "time"
    JOB = "job's phase"
    WORKER = "worker's phase"
    SUCCESSION = "what the succession comes to"


@dataclass(frozen=True)
class Strike:
    """One fault: it hits `rank` (or what stands for it) `delay_ms` after its trigger, for `length_ms` or so often."""

    kind: FaultKind
    on: On
    phase: str = ""
    skip: int = 0  # how often the trigger is let go by first
    delay_ms: int = 0
    rank: int = 0
    length_ms: int = 0


@dataclass(frozen=True)
class Speed:
    """How long things take, from and to, in ms."""

    boot_ms: tuple[int, int] = (20, 120)
    warm_ms: tuple[int, int] = (10, 80)
    setup_ms: tuple[int, int] = (10, 120)
    compute_ms: tuple[int, int] = (20, 90)
    between_ms: tuple[int, int] = (0, 12)
    update_ms: tuple[int, int] = (0, 12)
    replay_ms: tuple[int, int] = (5, 60)
    restore_ms: tuple[int, int] = (5, 80)


@dataclass(frozen=True)
class Plan:
    """One world."""

    seed: int
    spec: JobSpec
    script: Script
    slots: tuple[int, ...]  # of each node
    strikes: tuple[Strike, ...] = ()
    lacks: frozenset[Lack] = frozenset()
    weather: Weather = field(default_factory=Weather)
    speed: Speed = Speed()
    resets: float = 0.5  # chance that a peer sees that a connection was cut
    patience_ms: int = 40_000
    script_code: int = 7
    calm_ms: int = 12_000  # no fault after this
    snapshots: int = 0  # every so many steps; 0: none
    buddies: int = 1  # nodes that get a copy of each, beside the rank's own
    compares: bool = False  # replicas compare what they hold, in each step
    rack: int = 0  # nodes that are lost at once; only large worlds have racks
    apart: bool = False  # of what is parked each node finds the files of some ranks only
    head: int | None = None  # on which of the nodes the orchestrator begins; None: on none of them


# How often each kind is drawn. Rare: what ends most jobs, or takes long.
KINDS: dict[FaultKind, int] = {
    FaultKind.KILL: 10, FaultKind.EXIT: 3, FaultKind.RAISE: 4, FaultKind.STOP: 4, FaultKind.PAUSE: 4,
    FaultKind.HANG: 2, FaultKind.STUCK: 4, FaultKind.TWO: 5, FaultKind.KILL_REPLACEMENT: 5, FaultKind.KILL_SPARE: 3,
    FaultKind.STOP_SPARE: 2, FaultKind.CUT: 3, FaultKind.RECONFIGURE_BREAKS: 3, FaultKind.NEVER_RECONFIGURES: 1,
    FaultKind.RESTORE_BREAKS: 3, FaultKind.MISMATCH: 2, FaultKind.AGENT: 4, FaultKind.SPLIT: 4,
    FaultKind.LONG_SPLIT: 1, FaultKind.POWER: 4, FaultKind.ORCHESTRATOR: 5, FaultKind.UNDYING: 1, FaultKind.CANCEL: 1,
    FaultKind.MOVE: 8, FaultKind.MOVE_TWO: 6, FaultKind.MOVE_AND_BACK: 4, FaultKind.TAINT: 8, FaultKind.DRAIN: 6,
    FaultKind.FREEZE: 1, FaultKind.KILL_TARGET: 6, FaultKind.STOP_TARGET: 2, FaultKind.KILL_OUTGOING: 6,
    FaultKind.DOOMED_TARGETS: 4, FaultKind.FLIP: 4,
}  # fmt: skip
LACKS: dict[Lack, float] = {
    Lack.SPARES: 0.15, Lack.REFILL: 0.07, Lack.SLOTS: 0.05, Lack.REPLICAS: 0.05, Lack.HYBRID: 0.12, Lack.SLOW: 0.05,
    Lack.ERROR_ON_ONE: 0.04, Lack.ERROR_ON_ALL: 0.04, Lack.UNDECLARED: 0.05, Lack.REFUSED: 0.01,
    Lack.SECTIONS: 0.5, Lack.RESTARTS: 0.3, Lack.LATE: 0.15, Lack.LOST: 0.1, Lack.DOUBLED: 0.15,
    Lack.REORDERED: 0.07,
}  # fmt: skip
# Where strikes that wait for a phase strike, and how often: moments that are short and matter most come first.
PHASES: dict[JobPhase, int] = {
    JobPhase.STARTING: 1, JobPhase.RUNNING: 8, JobPhase.QUIESCING: 10, JobPhase.HALTING: 10, JobPhase.RELEASING: 5,
    JobPhase.AGREEING: 10, JobPhase.PREPARING: 6, JobPhase.RECONFIGURING: 6,
    JobPhase.RESUMING: 6, JobPhase.FINISHING: 1,
}  # fmt: skip
WORKER_PHASES: dict[WorkerPhase, int] = {
    WorkerPhase.BOOTING: 1, WorkerPhase.BETWEEN: 3, WorkerPhase.COMPUTING: 4, WorkerPhase.SECTION: 3,
    WorkerPhase.GATE: 8, WorkerPhase.UPDATING: 8, WorkerPhase.STOPPED: 3, WorkerPhase.FINISHED: 1,
}  # fmt: skip
# What is passed once per call is let go by a few times, so that most faults strike in the middle of the training.
CALLED = frozenset(WORKER_PHASES) - {WorkerPhase.BOOTING, WorkerPhase.STOPPED, WorkerPhase.FINISHED}


DEAFNESS = 0.08  # of the worlds
PARKING = 0.15
WHILE_PARKING = (JobPhase.QUIESCING, JobPhase.HALTING, JobPhase.PARKING, JobPhase.PARKING, JobPhase.SEALING)
INTO_PARKING = (
    FaultKind.KILL, FaultKind.TWO, FaultKind.ORCHESTRATOR, FaultKind.AGENT, FaultKind.SPLIT, FaultKind.POWER,
    FaultKind.CUT, FaultKind.STOP,
)  # fmt: skip
KEY = "0123456789abcdef"  # of what is parked
CALLED_OFF = 6  # moves that an operator thinks better of, where a strike waits for that
# Where targets and outgoing workers are.
MOVE_PHASES = (
    JobPhase.RUNNING, JobPhase.QUIESCING, JobPhase.HALTING, JobPhase.HALTING, JobPhase.RECONFIGURING, JobPhase.RESUMING,
)  # fmt: skip


def draw(seed: int, *, crowned: bool = True) -> Plan:
    """The plan of a seed. `crowned`: its orchestrator may have heirs."""
    chance = Random(seed)
    lacks = frozenset(lack for lack, share in LACKS.items() if chance.random() < share)
    ranks = chance.choice((2, 3, 3, 4))
    script = draw_script(chance, lacks, ranks)
    slots, spec = draw_cluster(chance, lacks, ranks)
    menu = chance.sample(list(KINDS), chance.randint(1, 8))
    strikes = tuple(draw_strike(chance, menu, ranks) for _ in range(chance.choice((0, 1, 1, 2, 2, 3, 4))))
    if chance.random() < 0.4:  # something to strike into
        wish = chance.choice((FaultKind.MOVE, FaultKind.MOVE_TWO, FaultKind.TAINT, FaultKind.DRAIN))
        asked = Strike(wish, On.JOB, JobPhase.RUNNING, 0, chance.randint(0, 300), chance.randrange(ranks), 5_000)
        strikes = (asked, *strikes)
    if any(strike.kind is FaultKind.DOOMED_TARGETS for strike in strikes):
        # Time and room for three targets, one after the other.
        strikes = (Strike(FaultKind.MOVE, On.JOB, JobPhase.RUNNING, 0, 50, chance.randrange(ranks)), *strikes)
        script = replace(script, calls=script.calls * 4)
        spec = msgspec.structs.replace(spec, slot_faults=0, moves_per_hour=-1)
    if any(strike.on is On.JOB and strike.phase == JobPhase.RELEASING for strike in strikes):
        # It lasts for milliseconds: several moves that may be called off, and time for them.
        aside = Random(seed ^ 0x7E1)
        asked = Strike(FaultKind.MOVE_AND_BACK, On.JOB, JobPhase.RUNNING)
        delays = [aside.randint(0, 1_500) for _ in range(CALLED_OFF)]
        strikes = (*(replace(asked, delay_ms=delay, rank=aside.randrange(ranks)) for delay in delays), *strikes)
        script = replace(script, calls=script.calls * 3)
        spec = msgspec.structs.replace(spec, moves_per_hour=-1)
    strikes = (*strikes, *draw_deafness(seed, ranks))
    parks = draw_parking(seed)
    if parks:
        strikes = (*parks, *strikes)
        spec = msgspec.structs.replace(spec, park_dir="/parked", park_key=KEY, park_ms=6_000)
    plan = Plan(seed, spec, script, slots, strikes, lacks, draw_weather(chance, lacks), resets=chance.random())
    if FaultKind.FLIP in menu:
        plan = replace(plan, compares=True)
    if Lack.REPLICAS in lacks or Lack.HYBRID in lacks:
        aside = Random(seed ^ 0x5A9)
        plan = replace(plan, snapshots=aside.choice((0, 1, 2, 3)), buddies=aside.choice((1, 2)))
    if Lack.SLOW in lacks:
        plan = replace(plan, speed=Speed(boot_ms=(500, 9_000), setup_ms=(10, 1_000), replay_ms=(5, 2_000)))
    return crown(plan) if crowned else plan


def draw_parking(seed: int) -> tuple[Strike, ...]:
    """Sometimes the job is to park. Drawn apart, too."""
    aside = Random(seed ^ 0x9A2C)
    if aside.random() >= PARKING:
        return ()
    asked = Strike(FaultKind.PARK, On.JOB, JobPhase.RUNNING, aside.choice((0, 0, 1)), aside.randint(0, 700))
    if aside.random() < 0.4:
        return (asked,)
    phase, delay_ms = aside.choice(WHILE_PARKING), aside.choice((0, 0, 1, 5, 20, aside.randint(0, 100)))
    kind, length_ms = aside.choice(INTO_PARKING), aside.choice((400, 2_000))
    return (asked, Strike(kind, On.JOB, phase, 0, delay_ms, aside.randrange(2), length_ms))


def going_on(plan: Plan, resumes: Resumed) -> Plan:
    """The world in which a parked job goes on: on as many nodes, with faults of its own."""
    aside = Random(plan.seed ^ 0x60E5)
    ranks = plan.spec.world_size
    kinds = [FaultKind.KILL, FaultKind.TWO, FaultKind.ORCHESTRATOR, FaultKind.RESTORE_BREAKS, FaultKind.AGENT]
    strikes = tuple(draw_strike(aside, kinds, ranks) for _ in range(aside.choice((0, 0, 1, 2))))
    strikes = (*strikes, *draw_parking(plan.seed ^ 0x33))
    spec = msgspec.structs.replace(plan.spec, resumes=resumes, park_key=KEY[::-1])
    return replace(plan, seed=plan.seed ^ 0x2ED, spec=spec, strikes=strikes, apart=aside.random() < 0.4)


def draw_deafness(seed: int, ranks: int) -> tuple[Strike, ...]:
    """Sometimes all nodes are cut off from the orchestrator. Drawn apart: other chances stay as they were."""
    aside = Random(seed ^ 0xDEAF)
    if aside.random() >= DEAFNESS:
        return ()
    phase = aside.choice((JobPhase.RUNNING, JobPhase.AGREEING, JobPhase.AGREEING, JobPhase.PREPARING))
    length_ms = aside.choice((400, 2_000, 7_000, 7_000))
    return (Strike(FaultKind.DEAF, On.JOB, phase, 0, aside.randint(0, 300), aside.randrange(ranks), length_ms),)


def draw_script(chance: Random, lacks: frozenset[Lack], ranks: int) -> Script:
    """A few steps, with sections between some."""
    calls: list[WorkerPhase] = []
    for _ in range(chance.randint(3, 9)):
        calls.append(STEP)
        while Lack.SECTIONS in lacks and chance.random() < 0.4:
            calls.append(SECTION)
    if Lack.REPLICAS in lacks:
        shards = tuple(f"shard-{rank}" for rank in range(ranks))
    elif Lack.HYBRID in lacks:
        shards = tuple(f"shard-{rank % 2}" for rank in range(ranks))
    else:
        shards = ("all",) * ranks
    error = None
    if Lack.ERROR_ON_ONE in lacks or Lack.ERROR_ON_ALL in lacks:
        one = chance.randrange(ranks) if Lack.ERROR_ON_ONE in lacks else None
        error = ScriptError(chance.randrange(len(calls)), one)
    some = frozenset(call for call in range(1, len(calls)) if chance.random() < 0.5)
    return Script(
        tuple(calls),
        shards,
        saves=some if Lack.RESTARTS in lacks else frozenset(),
        undeclared=some if Lack.UNDECLARED in lacks else frozenset(),
        error=error,
        refused=Lack.REFUSED in lacks,
    )


def draw_cluster(chance: Random, lacks: frozenset[Lack], ranks: int) -> tuple[tuple[int, ...], JobSpec]:
    """Nodes with slots, and the job's wishes. Spare slots are spread over the nodes."""
    nodes = chance.choice((1, 1, 2, 2, 3))
    each = -(-ranks // nodes)
    spares = 0 if Lack.SPARES in lacks else chance.choice((1, 1, 2))
    slots = [each] * nodes
    for extra in range(spares):
        slots[extra % nodes] += 1
    spec = JobSpec(
        job=JOB,
        world_size=ranks,
        nproc_per_node=each,
        nodes=nodes,
        spares=spares,
        refill=Lack.REFILL not in lacks,
        max_restarts=1 if Lack.RESTARTS in lacks else 0,
        slot_faults=1 if Lack.SLOTS in lacks else chance.choice((0, 3)),
        slot_window_ms=chance.choice((3_000, 600_000)),
        moves_per_hour=chance.choice((-1, -1, -1, 1)),
        probation_ms=chance.choice((0, 5_000, 3_600_000)),
        return_home=chance.random() < 0.2,
        ranks_per_slot=chance.choice((1, 1, 2)),
        spare_wait_ms=6_000,
        report_ms=6_000,
        ready_ms=9_000,
        reconfigure_ms=4_000,
        restore_ms=6_000,
    )
    return tuple(slots), spec


def draw_weather(chance: Random, lacks: frozenset[Lack]) -> Weather:
    """How messages travel."""
    return Weather(
        latency_ms=chance.choice(((0, 1), (1, 3), (1, 40))),
        late=0.05 if Lack.LATE in lacks else 0.0,
        lost=0.1 if Lack.LOST in lacks else 0.0,
        doubled=0.2 if Lack.DOUBLED in lacks else 0.0,
        reordered=Lack.REORDERED in lacks,
    )


def draw_strike(chance: Random, menu: list[FaultKind], ranks: int) -> Strike:
    """One fault of those on the menu, and when it strikes."""
    kind = chance.choices(menu, [KINDS[each] for each in menu])[0]
    on = chance.choice((On.TIME, On.JOB, On.WORKER)) if kind is not FaultKind.KILL_REPLACEMENT else On.JOB
    phase, skip = "", 0
    delay_ms = chance.choice((0, 1, 5, 20, chance.randint(0, 300)))
    if kind is FaultKind.KILL_REPLACEMENT:
        phase = chance.choice((JobPhase.PREPARING, JobPhase.PREPARING, JobPhase.RECONFIGURING, JobPhase.RESUMING))
        skip = 1 if phase in (JobPhase.RECONFIGURING, JobPhase.RESUMING) else 0
    elif on is On.JOB:
        phase = chance.choices(list(PHASES), list(PHASES.values()))[0]
        skip = chance.choice((0, 1, 1)) if phase in (JobPhase.RECONFIGURING, JobPhase.RESUMING) else 0
        delay_ms = chance.randint(0, 900) if phase is JobPhase.RUNNING else delay_ms
    elif on is On.WORKER:
        phase = chance.choices(list(WORKER_PHASES), list(WORKER_PHASES.values()))[0]
        skip = chance.randint(0, 5) if phase in CALLED else 0
        delay_ms = chance.choice((0, 0, 1, 3, chance.randint(0, 60)))
    else:
        delay_ms = chance.randint(0, 2_000)
    length_ms = chance.choice((50, 400, 2_000, 5_000))
    if kind in (FaultKind.KILL_TARGET, FaultKind.STOP_TARGET, FaultKind.KILL_OUTGOING) and on is not On.TIME:
        on, phase, skip = On.JOB, chance.choice(MOVE_PHASES), 0
        delay_ms = chance.choice((0, 0, 1, 3, 10, chance.randint(0, 150)))
    if kind is FaultKind.DOOMED_TARGETS:
        on, phase, skip, delay_ms = On.TIME, "", 0, 0
    if kind in (FaultKind.LONG_SPLIT, FaultKind.AGENT):
        length_ms = 20_000 if kind is FaultKind.LONG_SPLIT else chance.choice((100, 1_000, 5_000))
    return Strike(kind, on, phase, skip, delay_ms, chance.randrange(ranks), length_ms)


# ---------------------------------------------------------------- worlds whose orchestrator has heirs

CROWNED = 0.3  # of the worlds
# Faults of those who act, or may.
HEADS: dict[FaultKind, int] = {
    FaultKind.HEAD: 9, FaultKind.ORCHESTRATOR: 4, FaultKind.FROZEN: 5, FaultKind.HALVES: 6, FaultKind.HEIR: 3,
    FaultKind.HEIR_PROCESS: 2, FaultKind.AGENT: 2,
}  # fmt: skip
# What a succession comes to, and how often a strike waits for it.
COMES_TO: dict[str, int] = {
    "proposes": 3, "has heirs": 2, "loses an heir": 2, "stands": 4, "elected": 4, "acts": 3, "steps down": 1,
    "excluded": 1, "gives way": 1,
}  # fmt: skip


CROWN = frozenset(HEADS) - {FaultKind.ORCHESTRATOR, FaultKind.AGENT}


def crown(plan: Plan) -> Plan:
    """Sometimes the orchestrator is on one of the nodes, and lost with it. Drawn apart: other worlds stay as they were.

    Mostly there are three nodes or more, so that there are heirs; and often there is time to see what comes of it.
    """
    aside = Random(plan.seed ^ 0xC0DE)
    if aside.random() >= CROWNED:
        return plan
    nodes = max(len(plan.slots), aside.choice((1, 3, 3, 3, 3, 4, 5, 5)))
    slots = (*plan.slots, *((1,) * (nodes - len(plan.slots))))
    script = replace(plan.script, calls=plan.script.calls * aside.choice((1, 1, 2, 4)))
    kept = plan.strikes if aside.random() < 0.6 else plan.strikes[:1]
    strikes = tuple(draw_head_strike(aside) for _ in range(aside.choice((1, 1, 2, 2, 3, 6))))
    if aside.random() < 0.25:
        strikes, kept = draw_late_strikes(aside), ()
        script = replace(script, calls=plan.script.calls * 8)
    stirring = aside.choice((None, None, FaultKind.KILL, FaultKind.KILL, FaultKind.MOVE, FaultKind.DRAIN))
    if stirring is not None:  # something to strike into
        asked = Strike(stirring, On.JOB, JobPhase.RUNNING, 0, aside.randint(0, 300), aside.randrange(2), 5_000)
        strikes = (asked, *strikes)
    head = aside.randrange(nodes)
    plan = replace(plan, head=head)
    plan = replace(plan, slots=slots, script=script, strikes=(*strikes, *kept), calm_ms=30_000)
    if aside.random() < 0.3:  # elections are slow, and what was said before them comes late
        late = aside.choice((0.1, 0.5))
        plan = replace(plan, weather=replace(plan.weather, late=late, late_ms=aside.choice((600, 1_500))))
    return plan


def draw_late_strikes(chance: Random) -> tuple[Strike, ...]:
    """The head is stopped for a while, and so is who stands meanwhile; the head wakes up, and is lost soon after."""
    phase = chance.choice((JobPhase.RUNNING, JobPhase.RUNNING, JobPhase.AGREEING))
    stands = chance.choice(("stands", "stands", "elected"))
    wakes = chance.choice(("proposes", "has heirs", "steps down", "loses an heir"))
    strikes = [
        Strike(FaultKind.FROZEN, On.JOB, phase, 0, chance.randint(0, 300), 1, chance.randint(4_500, 9_000)),
        Strike(FaultKind.FROZEN, On.SUCCESSION, stands, 0, chance.randint(0, 2), 1, chance.randint(3_000, 15_000)),
        Strike(FaultKind.HEAD, On.SUCCESSION, wakes, chance.randint(3, 7), chance.randint(0, 60), 1, 40_000),
    ]
    if chance.random() < 0.7:
        strikes.append(Strike(FaultKind.HEIR, On.SUCCESSION, "has heirs", 1, chance.randint(0, 3_000), 1, 40_000))
    if phase is JobPhase.AGREEING or chance.random() < 0.5:
        strikes.append(Strike(FaultKind.KILL, On.JOB, JobPhase.RUNNING, 0, chance.randint(0, 200)))
    return tuple(strikes)


def draw_head_strike(chance: Random) -> Strike:
    """One fault of a head or an heir: while the job recovers or moves, during a succession, or at any time."""
    kind = chance.choices(list(HEADS), list(HEADS.values()))[0]
    on = chance.choice((On.JOB, On.JOB, On.TIME, On.SUCCESSION))
    phase, skip = "", 0
    delay_ms = chance.choice((0, 0, 1, 5, 20, chance.randint(0, 300)))
    if on is On.JOB:
        phase = chance.choices(list(PHASES), list(PHASES.values()))[0]
        skip = chance.choice((0, 1, 1)) if phase in (JobPhase.RECONFIGURING, JobPhase.RESUMING) else 0
        delay_ms = chance.randint(0, 900) if phase is JobPhase.RUNNING else delay_ms
    elif on is On.SUCCESSION:
        phase = chance.choices(list(COMES_TO), list(COMES_TO.values()))[0]
        skip = chance.choice((0, 0, 1)) if phase not in ("proposes", "has heirs") else chance.randint(0, 5)
    else:
        delay_ms = chance.choice((chance.randint(0, 600), chance.randint(0, 8_000)))
    length_ms = chance.choice((50, 1_000, 3_000, 6_000, 12_000, 40_000))
    return Strike(kind, on, phase, skip, delay_ms, chance.randrange(64), length_ms)
