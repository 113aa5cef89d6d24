"""What tests of transcripts share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from tests.support.telling import JOB, Stand, Story
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages import orders as od
from torchrelay.protocol.messages.ids import Generation, NodeId, Point, Rank, WorkerId, WorkerPhase
from torchrelay.protocol.model.job import Job
from torchrelay.protocol.model.moves import Move, Taint
from torchrelay.protocol.model.roster import Life, Seat, Worker

FOLDER = Path(__file__).parents[1] / "transcripts"
FILES = sorted(FOLDER.glob("*.txt"))


class Teller:
    """Carries out the commands of one transcript."""

    def __init__(self) -> None:
        self.story = Story()
        self._roster = ""
        self._told = 0
        self._moves_told = 0

    def tell(self, command: str) -> str:
        """Carry out one command; returns what is to be seen then."""
        verb, *words = command.split()
        plain = [word for word in words if "=" not in word]
        given = dict(word.split("=", 1) for word in words if "=" in word)
        act = getattr(self, f"do_{verb}", None)
        if act is not None:
            act(plain, given)
        else:
            self.story.hear(self.event(verb, given))
        return self.show()

    # ------------------------------------------------------------ commands

    def do_job(self, plain: list[str], given: dict[str, str]) -> None:
        del plain
        ranks = int(given.pop("ranks"))
        fields: dict[str, Any] = {name: value_of(ev.JobSpec, name, text) for name, text in given.items()}
        each = fields.pop("nproc_per_node", ranks)
        self.story.hear(ev.JobSubmitted(spec=ev.JobSpec(job=JOB, world_size=ranks, nproc_per_node=each, **fields)))

    def do_node(self, plain: list[str], given: dict[str, str]) -> None:
        alive = tuple(
            ev.WorkerSeen(worker=WorkerId(name), slot=0, pid=1, job=JOB)
            for name in given.get("workers", "").split(",")
            if name
        )
        self.story.hear(
            ev.NodeJoined(
                node=NodeId(plain[0]),
                incarnation=given.get("incarnation", "a"),
                slots=int(given["slots"]),
                workers=alive,
            )
        )

    def do_answer(self, plain: list[str], given: dict[str, str]) -> None:
        but = [int(rank) for rank in given.get("but", "").split(",") if rank]
        self.story.answer(tuple(getattr(od, kind) for kind in plain), but=but)

    def do_settle(self, plain: list[str], given: dict[str, str]) -> None:
        del plain, given
        self.story.settle()

    def do_train(self, plain: list[str], given: dict[str, str]) -> None:
        del given
        self.story.train(point_of(plain[0]))

    def do_stand(self, plain: list[str], given: dict[str, str]) -> None:
        worker = self.who(plain[0])
        before = self.story.stands.get(worker, Stand())
        points: dict[str, Any] = {
            name: point_of(given[name]) for name in ("committed", "pending", "caught_up") if name in given
        }
        phase = WorkerPhase(given["phase"]) if "phase" in given else before.phase
        shard = given.get("shard", before.shard)
        stand = before if list(given) == ["keeps"] else Stand(**points, phase=phase, shard=shard)
        self.story.stands[worker] = replace(stand, keeps=given.get("keeps") == "True")

    def do_lose(self, plain: list[str], given: dict[str, str]) -> None:
        how = {name: int(text) for name, text in given.items()}
        self.story.lose(self.who(plain[0]), code=how.get("code"), signal=how.get("signal"))

    def do_wait(self, plain: list[str], given: dict[str, str]) -> None:
        del given
        self.story.wait(int(plain[0]))

    def who(self, name: str) -> WorkerId:
        return self.story.holder(int(name)) if name.isdigit() else WorkerId(name)

    def event(self, name: str, given: dict[str, str]) -> ev.Event:
        """Any event; what is not said follows from the rank."""
        kind: type[ev.Event] = getattr(ev, name)
        fields: dict[str, Any] = {field: value_of(kind, field, text) for field, text in given.items()}
        names = kind.__struct_fields__
        if "rank" in fields and "worker" in names and "worker" not in fields:
            fields["worker"] = self.story.holder(fields["rank"])
        if "job" in names:
            fields.setdefault("job", JOB)
        if "generation" in names:
            fields.setdefault("generation", self.story.job.generation)
        if "rank" in fields and "rank" not in names:
            del fields["rank"]
        return kind(**fields)

    # ------------------------------------------------------------ what is to be seen

    def show(self) -> str:
        if JOB not in self.story.cluster.jobs:
            return "no job"
        job = self.story.job
        lines = [f"{job.phase}, generation {job.generation}: {job.why}"]
        roster = self.show_roster(job)
        if roster != self._roster:
            self._roster = roster
            lines.append(roster)
        lines += [f"  -> {show_order(order)}" for order in self.story.orders()]
        said = [text for incident in job.accounting.incidents for _, text in incident.story]
        lines += [f"  . {text}" for text in said[self._told :]]
        planned = [f"{move.name} {text}" for move in job.moving.moves for _, text in move.story]
        lines += [f"  ~ {text}" for text in planned[self._moves_told :]]
        self._told, self._moves_told = len(said), len(planned)
        return "\n".join(lines)

    def show_roster(self, job: Job) -> str:
        lines = [f"     {rank} {show_seat(seat)}" for rank, seat in sorted(job.seats.items())]
        for worker in sorted(self.story.cluster.workers.values(), key=lambda each: each.worker):
            if not job.is_held_by(worker.worker, worker.rank) or worker.life in (Life.STARTING, Life.FENCING):
                lines.append(f"     {worker.life} {worker.worker}{show_incoming_for(worker)}")
        lines += [f"     stray {worker} on {node}" for worker, (node, _) in sorted(self.story.cluster.strays.items())]
        lines += [f"     {show_taint(taint)}" for taint in self.story.cluster.taints.values()]
        lines += [f"     frozen by {source}: {why}" for source, why in self.story.cluster.freezes.items()]
        if job.open_move is not None:
            lines.append(f"     {show_move(job.open_move)}")
        return "\n".join(lines)

    def ending(self) -> str:
        """The ledger's view of all incidents, and how the job ended."""
        job = self.story.job
        lines = []
        for each in job.accounting.incidents:
            marks = " ".join(
                f"{mark}={at}" for mark, at in sorted(each.marks.items(), key=lambda pair: (pair[1], pair[0]))
            )
            lines.append(
                f"{each.name} {each.resolution}, eligible={each.eligible}, from {each.resume_point}: {each.verdict}"
            )
            lines.append(f"  {marks}; sources {each.sources}, {each.size} bytes, digest {each.digest!r}")
            lines += [f"  {fault.at_ms} {fault.detector}: {fault.cause} ({fault.rank})" for fault in each.faults]
        lines += [f"{show_move(move)}; {move.kind}, tries={move.tries}: {move.reason}" for move in job.moving.moves]
        if job.outcome is not None:
            lines.append(f"outcome {job.outcome.code}: {job.outcome.reason}")
        tried = job.attempts
        counts = f"trained={tried.trained} starts={tried.starts} restarts={tried.restarts} fruitless={tried.fruitless}"
        return "\n".join([*lines, counts])


def show_incoming_for(worker: Worker) -> str:
    """What a worker is to a move, if anything."""
    if worker.incoming_for is None:
        return ""
    brought = f", brought to {worker.brought}" if worker.brought is not None else ""
    return f" for rank {worker.incoming_for}{', prepared' if worker.prepared else ''}{brought}"


def show_taint(taint: Taint) -> str:
    until = f" until {taint.until_ms}" if taint.until_ms is not None else ""
    planned = ", planned" if taint.planned else ""
    return f"taint {taint.place} {taint.key} {taint.effect}{planned}{until}: {taint.reason}"


def show_move(move: Move) -> str:
    targets = "".join(f" {rank}=>{target}" for rank, target in sorted(move.targets.items()))
    return f"{move.name} {move.state} of {', '.join(map(str, move.ranks))}{targets}"


def show_seat(seat: Seat) -> str:
    flags = [
        name
        for name in ("replacement", "joined", "ready", "reconfigured", "resumed", "finished")
        if getattr(seat, name)
    ]
    records = ",".join(str(record.point) for record in seat.private)
    holds = f" holds {seat.holds}" if seat.holds is not None else ""
    left = f" left {records}" if records else ""
    apart = f" distrusts {sorted(seat.distrusted)}" if seat.distrusted else ""
    outgoing = f" after {seat.outgoing}" if seat.outgoing is not None else ""
    return f"{seat.worker or '-'} {' '.join(flags)}".rstrip() + holds + left + apart + outgoing


def show_order(order: od.Order) -> str:
    fields = {
        name: getattr(order, name) for name in order.__struct_fields__ if name not in ("node", "job", "generation")
    }
    worker = fields.pop("worker")
    for name in ("sources", "examples"):
        if fields.get(name):
            fields[name] = ",".join(f"{source.rank}@{source.address}" for source in fields[name])
    shown = " ".join(
        f"{name}={value}" for name, value in fields.items() if value not in ((), None) and value is not False
    )
    return f"{type(order).__name__} {worker} {shown}".rstrip()


def point_of(text: str) -> Point:
    step, _, section = text.partition("+")
    return Point(int(step), int(section or 0))


def value_of(kind: type[msgspec.Struct], name: str, text: str) -> Any:
    """A field's value, as written in a transcript. `_` stands for a blank."""
    hint = kind.__annotations__.get(name, "str") if name not in ("job", "generation", "worker", "rank") else name
    if "PrivateRecord" in hint:
        return tuple(ev.PrivateRecord(point_of(each), f"private at {each}".encode()) for each in text.split(","))
    if hint == "tuple[Rank, ...]":
        return tuple(Rank(int(each)) for each in text.split(","))
    if "Point" in hint:
        return point_of(text)
    if hint == "generation":
        return Generation(int(text))
    if hint == "WorkerPhase":
        return WorkerPhase(text)
    if hint == "Effect":
        return ev.Effect(text)
    if hint == "bool":
        return text == "True"
    if hint == "bytes":
        return text.encode()
    if "int" in hint or hint in ("rank", "Rank"):
        return int(text)
    return text.replace("_", " ") if "str" in hint else text


def retell(text: str) -> str:
    """The transcript, as it is now."""
    teller, blocks = Teller(), []
    for block in text.strip().split("\n\n"):
        above = block.partition("\n----")[0].splitlines()
        commands = [line for line in above if line and not line.startswith("#")]
        if commands == ["THE END"]:
            continue
        seen = [teller.tell(command) for command in commands][-1] if commands else ""
        blocks.append("\n".join([*above, "----", seen]) if commands else block)
    blocks.append(f"THE END\n----\n{teller.ending()}")
    return "\n\n".join(blocks) + "\n"
