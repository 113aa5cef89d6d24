"""API: what operators ask and order, over HTTP. JSON; a bearer token for everything but `/healthz`.

    GET  /v1/status                    jobs and nodes at a glance
    GET  /v1/jobs/{job}/ranks          the roster, with what each worker does
    GET  /v1/jobs/{job}/incidents      all incidents, with every decision and its reason
    GET  /v1/incidents/{name}          one of them (?job= if several jobs have one of that name)
    GET  /v1/events                    the story as server-sent events: everything after ?since=seq, then as it happens
                                       (event `degraded`: why nothing is decided at the moment, "" when it is again)
    POST /v1/jobs                      submit: a JobSpec
    POST /v1/jobs/{job}/cancel         {"reason": "..."}
    POST /v1/shutdown                  end all workers, agents, and the orchestrator
    GET  /healthz                      200 while decisions are made, 503 while they are not

Errors are `{"error": "what is wrong and what to do"}`.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from msgspec import Struct

from torchrelay.orchestrator.agents import serve_agent
from torchrelay.orchestrator.clock import wall_clock_ms
from torchrelay.orchestrator.journal import JournalUnavailable
from torchrelay.orchestrator.service import Orchestrator
from torchrelay.orchestrator.story import Moment
from torchrelay.orchestrator.views import Status, view_incident, view_incidents, view_job, view_nodes, view_ranks
from torchrelay.protocol.events import JobCancelled, JobSpec, JobSubmitted
from torchrelay.protocol.ids import JobId
from torchrelay.protocol.job import Job
from torchrelay.wire.channel import AGENT_PATH
from torchrelay.wire.trust import bearer_matches

SERVICE: web.AppKey[Orchestrator] = web.AppKey("service", Orchestrator)
VERSION = version("torchrelay")
KEEPALIVE_S = 5.0  # a comment on a silent event stream, so that both ends notice when the other is gone
JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
MAX_BODY = 1 << 20

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
T = TypeVar("T")


class Cancel(Struct, frozen=True):
    """The body of a cancel."""

    reason: str = "cancelled by the operator"


class ShutDown(Struct, frozen=True):
    """The body of a shutdown."""

    reason: str = "shut down by the operator"


def make_app(service: Orchestrator, token: str) -> web.Application:
    """The web application: operators' API and agents' channel behind one port and one token."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path != "/healthz" and not bearer_matches(token, request.headers.get("Authorization")):
            raise refusal(web.HTTPUnauthorized, "wrong or missing token: it is in the file `token` of the run's folder")
        return await handler(request)

    app = web.Application(middlewares=[guard], client_max_size=MAX_BODY)
    app[SERVICE] = service
    app.add_routes(
        [
            web.get("/healthz", get_health),
            web.get("/v1/status", get_status),
            web.get("/v1/jobs/{job}/ranks", get_ranks),
            web.get("/v1/jobs/{job}/incidents", get_incidents),
            web.get("/v1/incidents/{name}", get_incident),
            web.get("/v1/events", get_events),
            web.post("/v1/jobs", post_job),
            web.post("/v1/jobs/{job}/cancel", post_cancel),
            web.post("/v1/shutdown", post_shutdown),
            web.get(AGENT_PATH, get_agent),
        ]
    )
    return app


# ---------------------------------------------------------------- answers


def answer(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def refusal(kind: type[web.HTTPException], text: str) -> web.HTTPException:
    """An error in the API's form."""
    return kind(text=msgspec.json.encode({"error": text}).decode(), content_type="application/json")


async def body_of(request: web.Request, kind: type[T]) -> T:
    """The body, decoded strictly; an empty one stands for the defaults."""
    data = await request.read()
    try:
        return msgspec.json.decode(data or b"{}", type=kind)
    except msgspec.DecodeError as error:
        raise refusal(web.HTTPBadRequest, f"the body is not a valid {kind.__name__}: {error}") from error


def job_of(request: web.Request) -> Job:
    service = request.app[SERVICE]
    name = request.match_info["job"]
    job = service.cluster.jobs.get(JobId(name))
    if job is None:
        known = ", ".join(sorted(service.cluster.jobs)) or "none"
        raise refusal(web.HTTPNotFound, f"no job named {name!r}; known: {known}")
    return job


# ---------------------------------------------------------------- looking


async def get_health(request: web.Request) -> web.Response:
    degraded = request.app[SERVICE].degraded
    return answer({"ok": not degraded, "degraded": degraded}, 503 if degraded else 200)


def status_of(service: Orchestrator) -> Status:
    scene = service.scene()
    return Status(
        version=VERSION,
        pid=os.getpid(),
        at=scene.at(scene.now_ms),
        seq=service.journal.last_seq,
        degraded=service.degraded,
        jobs=tuple(view_job(scene, job) for job in service.cluster.jobs.values()),
        nodes=view_nodes(scene),
    )


async def get_status(request: web.Request) -> web.Response:
    return answer(status_of(request.app[SERVICE]))


async def get_ranks(request: web.Request) -> web.Response:
    return answer(view_ranks(request.app[SERVICE].scene(), job_of(request)))


async def get_incidents(request: web.Request) -> web.Response:
    return answer(view_incidents(request.app[SERVICE].scene(), job_of(request)))


async def get_incident(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    name, of = request.match_info["name"], request.query.get("job")
    found = [
        incident
        for job in service.cluster.jobs.values()
        for incident in job.incidents
        if incident.name == name and of in (None, job.spec.job)
    ]
    if not found:
        raise refusal(web.HTTPNotFound, f"no incident {name!r}; `torchrelay incidents` lists them")
    if len(found) > 1:
        jobs = ", ".join(incident.job for incident in found)
        raise refusal(web.HTTPConflict, f"several jobs have an incident {name}: add ?job= with one of {jobs}")
    return answer(view_incident(service.scene(), found[0]))


async def get_events(request: web.Request) -> web.StreamResponse:
    """The story, from where the reader left off. `id:` is the seq to pass as `since` after a break."""
    service = request.app[SERVICE]
    try:
        since = int(request.query.get("since") or request.headers.get("Last-Event-ID") or 0)
    except ValueError:
        raise refusal(web.HTTPBadRequest, "`since` is the number of the last event you have, or 0") from None
    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
    await stream.prepare(request)
    try:
        await tell_all(service, stream, since)
    except ConnectionError:
        pass  # the reader has gone
    return stream


async def tell_all(service: Orchestrator, stream: web.StreamResponse, since: int) -> None:
    """Everything after `since`, for as long as the service runs; and whenever it becomes degraded or well again."""
    degraded = ""
    while not service.over:
        news = service.news
        if service.degraded != degraded:
            degraded = service.degraded
            await stream.write(b"event: degraded\ndata: %b\n\n" % msgspec.json.encode(degraded))
        fresh = service.moments_after(since)
        if fresh:
            await stream.write(b"".join(frame(moment) for moment in fresh))
            since = fresh[-1].seq
            continue
        try:
            async with asyncio.timeout(KEEPALIVE_S):
                await news.wait()
        except TimeoutError:
            await stream.write(b": still here\n\n")


def frame(moment: Moment) -> bytes:
    return b"id: %d\ndata: %b\n\n" % (moment.seq, msgspec.json.encode(moment))


# ---------------------------------------------------------------- ordering


def check_spec(spec: JobSpec) -> str:
    """What is wrong with a spec; empty if nothing is."""
    if not JOB_NAME.fullmatch(spec.job):
        return f"job name {spec.job!r}: use letters, digits, '.', '_' and '-', at most 63, a letter or digit first"
    for name in ("world_size", "nproc_per_node", "nodes"):
        if getattr(spec, name) < 1:
            return f"{name} is {getattr(spec, name)}: it must be at least 1"
    for name in ("spares", "max_restarts", "slot_faults", "spare_wait_ms"):
        if getattr(spec, name) < 0:
            return f"{name} is {getattr(spec, name)}: it cannot be negative"
    if spec.world_size != spec.nodes * spec.nproc_per_node:
        ranks = f"{spec.nodes} nodes of {spec.nproc_per_node} have {spec.nodes * spec.nproc_per_node} ranks"
        return f"world_size is {spec.world_size}, but {ranks}: give the same number"
    return ""


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
        await journalled(service, JobSubmitted(spec=spec))
    job = service.cluster.jobs[spec.job]
    return answer(view_job(service.scene(), job), 200 if known is not None else 201)


async def post_cancel(request: web.Request) -> web.Response:
    job = job_of(request)
    cancel = await body_of(request, Cancel)
    service = request.app[SERVICE]
    await journalled(service, JobCancelled(job=job.spec.job, reason=cancel.reason))
    return answer(view_job(service.scene(), service.cluster.jobs[job.spec.job]), 202)


async def journalled(service: Orchestrator, event: JobSubmitted | JobCancelled) -> None:
    try:
        await service.put(event)
    except JournalUnavailable as error:
        raise refusal(web.HTTPServiceUnavailable, str(error)) from error


async def post_shutdown(request: web.Request) -> web.Response:
    order = await body_of(request, ShutDown)
    service = request.app[SERVICE]
    service.begin_shutdown(order.reason)
    return answer({"at_ms": wall_clock_ms(), "agents": len(service.links)}, 202)


async def get_agent(request: web.Request) -> web.StreamResponse:
    return await serve_agent(request, request.app[SERVICE])
