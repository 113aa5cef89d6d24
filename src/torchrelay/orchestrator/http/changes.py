"""Changes: the calls that change something, and the files that freeze. Each is in the journal with who asked for it.

    POST /v1/jobs                      submit: a JobSpec
    POST /v1/jobs/{job}/cancel         {"reason": "..."}
    POST /v1/jobs/{job}/signal         {"signal": "SIGTERM", "grace_ms": 30000}: pass it on to the ranks
    POST /v1/jobs/{job}/migrate        {"ranks": [2]} or {"node": "node-1"}; "to", "reason", "cancel"
    POST /v1/taint, /v1/untaint        {"node": "node-1", "slot": 0, "key": "gpu/ecc", ...}
    POST /v1/drain, /v1/undrain        {"node": "node-1", "reason": "..."}
    POST /v1/cordon, /v1/uncordon      the same
    POST /v1/restart                   {"orchestrator": true, "agents": true, "force": false}
    POST /v1/audit                     {"call": "chaos kill", "what": "..."}: write down what was done from elsewhere
    POST /v1/shutdown                  end all workers, agents, and the orchestrator

Those from `migrate` to `restart` take `?dry_run=1`: the same answer (`Change`), and nothing is changed. The caller says
who he is in the header `X-Torchrelay-Who`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
from aiohttp import web
from msgspec import Struct

from torchrelay.api.endpoint import FREEZE, LIFTED, RESTART, TOKEN
from torchrelay.api.shown import LONGEST_MS, Change
from torchrelay.orchestrator.core.clock import wall_clock_ms
from torchrelay.orchestrator.core.heirs import safe
from torchrelay.orchestrator.core.service import Orchestrator
from torchrelay.orchestrator.http.answers import SERVICE, answer, body_of, job_of, refusal, who_of
from torchrelay.orchestrator.store.journal import Call, JournalUnavailable, Superseded, Unwritable
from torchrelay.orchestrator.views.plans import (
    CORDON,
    MigrateAsk,
    Planned,
    PlanRefused,
    TaintAsk,
    UntaintAsk,
    check_jobs,
    plan_migrate,
    plan_taint,
    plan_untaint,
    tell_change,
)
from torchrelay.orchestrator.views.views import view_job
from torchrelay.protocol.messages.events import (
    Effect,
    Event,
    FreezeCleared,
    FreezeSet,
    JobCancelled,
    JobSpec,
    JobSubmitted,
    SignalAsked,
)
from torchrelay.protocol.model.job import JobPhase
from torchrelay.protocol.model.moves import MoveState
from torchrelay.schedulers.local import write_file
from torchrelay.wire.files.owned import Foreign, read_owned
from torchrelay.wire.messages.channel import SHUTDOWN_GRACE_S
from torchrelay.wire.trust.trust import TrustError, read_token, redact

Planner = Callable[[Orchestrator, str], Planned]
MOST_RANKS = 100_000
PASSED_ON = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2")
SIGNALS = {name: int(signal.Signals[name]) for name in PASSED_ON}
MOST = 1_000_000
JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


class Cancel(Struct, frozen=True):
    """The body of a cancel."""

    reason: str = "cancelled by the operator"


class SignalAsk(Struct, frozen=True, kw_only=True):
    """The body of a signal. `grace_ms`: the job is to stop, within so long; None: it goes on."""

    signal: str
    grace_ms: int | None = None
    reason: str = "asked for by the operator"


class ShutDown(Struct, frozen=True):
    """The body of a shutdown."""

    reason: str = "shut down by the operator"
    grace_s: float = SHUTDOWN_GRACE_S  # that workers have between SIGTERM and SIGKILL


class RestartAsk(Struct, frozen=True, kw_only=True):
    """What is to be restarted, under a running job. Written to RUN_DIR/restart.json for whoever keeps the processes."""

    orchestrator: bool = True
    agents: bool = True
    force: bool = False
    who: str = ""


# ---------------------------------------------------------------- jobs


def check_spec(spec: JobSpec) -> str:
    """What is wrong with a spec; empty if nothing is."""
    if not JOB_NAME.fullmatch(spec.job):
        return f"job name {spec.job!r}: use letters, digits, '.', '_' and '-', at most 63, a letter or digit first"
    for name, value in msgspec.structs.asdict(spec).items():
        if type(value) is int:
            least, most = bounds(name)
            if value < least:
                must = "it cannot be negative" if least == 0 else f"it must be at least {least}"
                return f"{name} is {value}: {must}"
            if value > most:
                return f"{name} is {value}: it must be at most {most}"
    if spec.world_size != spec.nodes * spec.nproc_per_node:
        ranks = f"{spec.nodes} nodes of {spec.nproc_per_node} have {spec.nodes * spec.nproc_per_node} ranks"
        return f"world_size is {spec.world_size}, but {ranks}: give the same number"
    return ""


def bounds(name: str) -> tuple[int, int]:
    """The least and the most that a number of a spec may be."""
    if name in ("world_size", "nproc_per_node", "nodes", "ranks_per_slot"):
        return 1, MOST_RANKS
    if name.endswith("_ms"):
        return 0, LONGEST_MS
    return (-MOST, MOST) if name == "moves_per_hour" else (0, MOST_RANKS if name == "spares" else MOST)


async def post_job(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    spec = await body_of(request, JobSpec)
    wrong = check_spec(spec)
    if wrong:
        raise refusal(web.HTTPBadRequest, wrong)
    known = service.cluster.jobs.get(spec.job)
    if known is not None and known.spec != spec:
        raise refusal(web.HTTPConflict, f"there is a job named {spec.job!r} with another spec: choose another name")
    if known is None:
        what = f"{spec.job}: {spec.world_size} ranks, {spec.spares} spares"
        await journalled(request, JobSubmitted(spec=spec), "submit", what)
    await safe(service)
    job = service.cluster.jobs[spec.job]
    return answer(view_job(service.scene(), job), 200 if known is not None else 201)


async def post_cancel(request: web.Request) -> web.Response:
    job = job_of(request)
    cancel = await body_of(request, Cancel)
    service = request.app[SERVICE]
    event = JobCancelled(job=job.spec.job, reason=cancel.reason)
    await journalled(request, event, "cancel", f"{job.spec.job}: {cancel.reason}")
    return answer(view_job(service.scene(), service.cluster.jobs[job.spec.job]), 202)


async def post_signal(request: web.Request) -> web.Response:
    """Pass a signal on to the ranks; with a grace time the job is to stop."""
    job = job_of(request)
    ask = await body_of(request, SignalAsk)
    number = SIGNALS.get(ask.signal)
    if number is None:
        raise refusal(
            web.HTTPBadRequest, f"signal {ask.signal!r} is not passed on; those that are: {', '.join(SIGNALS)}"
        )
    if ask.grace_ms is not None and not 0 <= ask.grace_ms <= LONGEST_MS:
        raise refusal(web.HTTPBadRequest, f"grace_ms is {ask.grace_ms}: give 0 to {LONGEST_MS}")
    service = request.app[SERVICE]
    event = SignalAsked(job=job.spec.job, number=number, grace_ms=ask.grace_ms, reason=ask.reason)
    await journalled(request, event, "signal", f"{job.spec.job}: {ask.signal}, {ask.reason}")
    return answer(view_job(service.scene(), service.cluster.jobs[job.spec.job]), 202)


async def journalled(request: web.Request, event: Event, call: str, what: str) -> None:
    """Let the orchestrator hear an event, with who asked for it."""
    try:
        await request.app[SERVICE].put(event, called(request, call, what))
    except Unwritable as error:
        raise refusal(web.HTTPBadRequest, str(error)) from error
    except JournalUnavailable as error:
        raise refusal(web.HTTPServiceUnavailable, str(error)) from error


def called(request: web.Request, call: str, what: str) -> Call:
    return Call(wall_ms=wall_clock_ms(), who=who_of(request), call=call, what=what)


async def noted(request: web.Request, call: str, what: str) -> None:
    """Write down a call that leads to no event."""
    try:
        request.app[SERVICE].journal.note(called(request, call, what))
    except Unwritable as error:
        raise refusal(web.HTTPBadRequest, str(error)) from error
    except (JournalUnavailable, Superseded) as error:
        raise refusal(web.HTTPServiceUnavailable, str(error)) from error
    await safe(request.app[SERVICE])


class Deed(Struct, frozen=True, kw_only=True):
    """What an operator did by himself, for the audit."""

    call: str
    what: str


async def post_audit(request: web.Request) -> web.Response:
    deed = await body_of(request, Deed)
    await noted(request, deed.call, deed.what)
    return answer({}, 201)


async def post_shutdown(request: web.Request) -> web.Response:
    order = await body_of(request, ShutDown)
    service = request.app[SERVICE]
    try:
        service.journal.note(called(request, "shutdown", order.reason))
    except (JournalUnavailable, Unwritable):
        pass  # an end must be possible on a full disk, too
    except Superseded as error:
        raise refusal(web.HTTPServiceUnavailable, str(error)) from error
    service.begin_shutdown(order.reason, order.grace_s)
    return answer({"at_ms": wall_clock_ms(), "agents": len(service.connections)}, 202)


# ---------------------------------------------------------------- places and ranks


async def post_migrate(request: web.Request) -> web.Response:
    ask = await body_of(request, MigrateAsk)
    job = job_of(request)
    return await carried_out(request, lambda service, who: plan_migrate(service.scene(), job, ask, who), wish_text(ask))


async def post_taint(request: web.Request) -> web.Response:
    ask = msgspec.structs.replace(await body_of(request, TaintAsk), verb="taint")
    value = f"={ask.value}" if ask.value else ""
    what = f"{place_of(ask)} {ask.key}{value}:{ask.effect}{because(ask.reason)}"
    return await carried_out(request, lambda service, who: plan_taint(service.scene(), ask, who), what)


async def post_drain(request: web.Request) -> web.Response:
    ask = await body_of(request, TaintAsk)
    ask = TaintAsk(node=ask.node, slot=ask.slot, reason=ask.reason, ttl_ms=ask.ttl_ms, verb="drain")
    what = f"{place_of(ask)}{because(ask.reason)}"
    return await carried_out(request, lambda service, who: plan_taint(service.scene(), ask, who), what)


async def post_untaint(request: web.Request) -> web.Response:
    ask = msgspec.structs.replace(await body_of(request, UntaintAsk), verb="untaint")
    what = f"{place_of(ask)} {ask.key}{' (healed)' if ask.healed else ''}"
    return await carried_out(request, lambda service, who: plan_untaint(service.scene(), ask, who), what)


async def post_undrain(request: web.Request) -> web.Response:
    ask = await body_of(request, UntaintAsk)
    ask = UntaintAsk(node=ask.node, slot=ask.slot, healed=True, verb="undrain")
    return await carried_out(request, lambda service, who: plan_untaint(service.scene(), ask, who), place_of(ask))


async def post_cordon(request: web.Request) -> web.Response:
    ask = await body_of(request, TaintAsk)
    ask = TaintAsk(
        node=ask.node,
        slot=ask.slot,
        key=CORDON,
        effect=Effect.NO_SCHEDULE,
        reason=ask.reason,
        ttl_ms=ask.ttl_ms,
        verb="cordon",
    )
    what = f"{place_of(ask)}{because(ask.reason)}"
    return await carried_out(request, lambda service, who: plan_taint(service.scene(), ask, who), what)


async def post_uncordon(request: web.Request) -> web.Response:
    ask = await body_of(request, UntaintAsk)
    ask = UntaintAsk(node=ask.node, slot=ask.slot, key=CORDON, healed=True, verb="uncordon")
    return await carried_out(request, lambda service, who: plan_untaint(service.scene(), ask, who), place_of(ask))


def place_of(ask: TaintAsk | UntaintAsk) -> str:
    return ask.node if ask.slot is None else f"{ask.node}/{ask.slot}"


def because(reason: str) -> str:
    return f": {reason}" if reason else ""


def wish_text(ask: MigrateAsk) -> str:
    which = f"ranks {', '.join(map(str, ask.ranks))}" if ask.ranks else f"all on {ask.node}"
    to = f" to {ask.to}" if ask.to is not None else ""
    return f"{'cancel ' if ask.cancel else ''}{which}{to}{because(ask.reason)}"


async def carried_out(request: web.Request, plan: Planner, what: str) -> web.Response:
    """Plan; unless that is all that is wanted, do it, and say what has become of it."""
    service = request.app[SERVICE]
    try:
        planned = plan(service, who_of(request))
    except PlanRefused as error:
        raise refusal(web.HTTPBadRequest, str(error)) from error
    if is_dry(request) or planned.event is None:
        await safe(service)  # what is so already may have been asked for a moment ago
        return answer(planned.change)
    before = service.cluster
    await journalled(request, planned.event, planned.change.verb, what)
    lines, explain = planned.change.plan, planned.change.explain
    now = tell_change(before, service.cluster, planned.change.verb, (), planned.ranks, explain, applied=True)
    return answer(msgspec.structs.replace(now, plan=lines), 202)


def is_dry(request: web.Request) -> bool:
    return request.query.get("dry_run", "") not in ("", "0", "false")


# ---------------------------------------------------------------- torchrelay itself


async def post_restart(request: web.Request) -> web.Response:
    """Ask whoever keeps the processes (`torchrelay run`) to start them again. Training goes on."""
    ask = await body_of(request, RestartAsk)
    service = request.app[SERVICE]
    wrong = check_restart(service, ask)
    if wrong:
        raise refusal(web.HTTPConflict, wrong)
    what = " and ".join([*(["orchestrator"] if ask.orchestrator else []), *(["agents"] if ask.agents else [])])
    nodes = ", ".join(sorted(service.connections)) or "none"
    lines = ["the orchestrator ends in order and is started again with what is installed now"] * ask.orchestrator
    lines += [f"the agents ({nodes}) are started again, one after the other; they adopt their workers"] * ask.agents
    change = Change(verb="restart-services", applied=False, changes=True, plan=(*lines, "training goes on"))
    if is_dry(request):
        return answer(change)
    await noted(request, "restart-services", what + (" (forced)" if ask.force else ""))
    write_file(service.journal.path.parent / RESTART, msgspec.structs.replace(ask, who=who_of(request)))
    return answer(msgspec.structs.replace(change, applied=True), 202)


def check_restart(service: Orchestrator, ask: RestartAsk) -> str:
    """What speaks against a restart now; empty if nothing does."""
    if not (ask.orchestrator or ask.agents):
        return "nothing is to be restarted: name the orchestrator, the agents, or both"
    if not service.kept:
        return "this orchestrator was not started by `torchrelay run`: nobody would start it again; end and start it"
    try:
        check_jobs(service.cluster)
    except PlanRefused as error:
        return str(error)
    if ask.force:
        return ""
    for job in service.cluster.jobs.values():
        if job.phase not in (JobPhase.RUNNING, JobPhase.ENDED):
            return f"{job.spec.job} is {job.phase} ({job.why}): try again when it trains, or use --force"
        move = job.open_move
        if move is not None and move.state is not MoveState.WAITING:
            return f"{move.name} of {job.spec.job} is {move.state}: try again when it is done, or use --force"
    return ""


ROUTES = (
    web.post("/v1/jobs", post_job),
    web.post("/v1/jobs/{job}/cancel", post_cancel),
    web.post("/v1/jobs/{job}/signal", post_signal),
    web.post("/v1/jobs/{job}/migrate", post_migrate),
    web.post("/v1/taint", post_taint),
    web.post("/v1/untaint", post_untaint),
    web.post("/v1/drain", post_drain),
    web.post("/v1/undrain", post_undrain),
    web.post("/v1/cordon", post_cordon),
    web.post("/v1/uncordon", post_uncordon),
    web.post("/v1/restart", post_restart),
    web.post("/v1/audit", post_audit),
    web.post("/v1/shutdown", post_shutdown),
)


# ---------------------------------------------------------------- freezing by file

# While RUN_DIR/FREEZE, or FREEZE in the folder of all runs, is there, the orchestrator looks on.
#
# A file works without an API, a token, or a living orchestrator, and who comes back looks for it before anything else.
# Its first line says why; the second, if there is one, who made it.

log = logging.getLogger("torchrelay.orchestrator")

LOOK_S = 0.5
LIFTED_S = 30.0
PREFIX = "file "  # of a source; what other sources say is not ours to lift
DROPPED = "(not shown: it holds what looks like a secret)"

FileChange = tuple[FreezeSet | FreezeCleared, Call]
_told: dict[Path, str] = {}  # what is not heeded, and why: told once


def freeze_files(run_dir: Path) -> tuple[Path, Path]:
    """Where the file may lie: for this run, and for all runs of the folder it is in."""
    own = run_dir.absolute()
    return own / FREEZE, own.parent / FREEZE


def read_freezes(run_dir: Path) -> dict[str, tuple[str, str]]:
    """The files that are there, as sources, with the reason and who made them.

    What is not a plain file of ours (or of root) is not heeded: folders of runs may lie where anybody may write.
    """
    found = {}
    for path in freeze_files(run_dir):
        try:
            file = read_owned(path)
            lines, owner = lines_of(without_secrets(file.text, run_dir)), file.uid
        except FileNotFoundError:
            _told.pop(path, None)
            continue
        except Foreign as error:
            if _told.get(path) != str(error):
                log.warning("%s is not heeded: %s", path, error)
                _told[path] = str(error)
            continue
        except OSError as error:  # it is there, and that is what counts
            owner, lines = os.getuid(), [f"({path.name} cannot be read: {error.strerror})"]
        _told.pop(path, None)
        reason, who = (*lines, "", "")[:2]
        found[f"{PREFIX}{path}"] = (reason, who or f"uid {owner}")
    return found


def lines_of(text: str) -> list[str]:
    """The lines of a text, without what a terminal would take for an order."""
    return ["".join(c for c in line if c.isprintable()).strip() for line in text.splitlines()]


def without_secrets(text: str, run_dir: Path) -> str:
    """What a file says is journalled and shown: no secret may get there, however it came into the file."""
    try:
        token = read_token(run_dir / TOKEN)
    except TrustError:
        token = ""
    return DROPPED if redact(text) != text or (token and token in text) else text


def changes_of_files(known: Mapping[str, str], found: Mapping[str, tuple[str, str]]) -> list[FileChange]:
    """What the files say that the state does not know yet."""
    now = wall_clock_ms()
    said: list[FileChange] = []
    for source, (reason, who) in found.items():
        if known.get(source) != reason:
            call = Call(wall_ms=now, who=who, call="freeze", what=f"{source}{': ' if reason else ''}{reason}")
            said.append((FreezeSet(source=source, reason=reason), call))
    for source in known:
        if source.startswith(PREFIX) and source not in found:
            who = lifted_by(Path(source.removeprefix(PREFIX)))
            call = Call(wall_ms=now, who=who, call="unfreeze", what=source)
            said.append((FreezeCleared(source=source), call))
    return said


def lifted_by(path: Path) -> str:
    """Who removed a file, if it was `torchrelay unfreeze` and just now: that leaves its name beside it."""
    try:
        note = read_owned(path.with_name(LIFTED))
        if time.time() - note.changed_s < LIFTED_S:
            return lines_of(without_secrets(note.text, path.parent))[0]
    except (OSError, Foreign, IndexError):
        pass  # somebody else did
    return "whoever removed the file"


def look_for_freezes(service: Orchestrator, run_dir: Path) -> None:
    """Look once, before anything is done. Raises `JournalUnavailable`, `Superseded`."""
    for event, call in changes_of_files(service.cluster.freezes, read_freezes(run_dir)):
        try:
            service.hear(event, call)
        except Unwritable as error:
            log.warning("a freeze could not be noted: %s", error)


async def watch_freezes(service: Orchestrator, run_dir: Path) -> None:
    """Look every half second, for ever."""
    while True:
        try:
            for event, call in changes_of_files(service.cluster.freezes, read_freezes(run_dir)):
                await service.put(event, call)
        except (JournalUnavailable, Unwritable) as error:
            log.warning("a freeze could not be noted: %s", error)
        await asyncio.sleep(LOOK_S)
