"""API: what operators ask and order, over HTTP. JSON; a bearer token for everything but `/healthz`.

    GET  /v1/status                    jobs and nodes at a glance
    GET  /v1/nodes                     nodes with their slots, taints, and the faults that are remembered
    GET  /v1/jobs/{job}/ranks          the roster, with what each worker does
    GET  /v1/jobs/{job}/spares         workers without a rank, and why they have none
    GET  /v1/jobs/{job}/moves          planned and pre-emptive moves of ranks, with every decision and its reason
    GET  /v1/jobs/{job}/incidents      all incidents, likewise
    GET  /v1/jobs/{job}/why?about=     why something is as it is, or is not: M-3, rank 3, node-1, node-1/0, a worker
    GET  /v1/incidents/{name}          one of them (?job= if several jobs have one of that name)
    GET  /v1/network                   the nodes' network paths, as their agents tell of them
    GET  /metrics                      figures of these for Prometheus
    GET  /v1/audit                     every changing call: who, when, what
    GET  /v1/events                    the story as server-sent events: everything after ?since=seq, then as it happens
                                       (event `degraded`: why nothing is decided at the moment, "" when it is again)
    GET  /healthz                      200 while decisions are made, 503 while they are not

Calls that change something are in `changes`. Errors are `{"error": "what is wrong and what to do"}`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from importlib.metadata import version

import msgspec
from aiohttp import web
from msgspec import Struct

from torchrelay.api.shown import Status
from torchrelay.orchestrator.core.agents import serve_agent
from torchrelay.orchestrator.core.service import Orchestrator
from torchrelay.orchestrator.http import changes
from torchrelay.orchestrator.http.answers import SERVICE, answer, job_of, refusal
from torchrelay.orchestrator.http.door import Strangers
from torchrelay.orchestrator.http.networks import get_metrics, get_network
from torchrelay.orchestrator.store.journal import JournalUnavailable
from torchrelay.orchestrator.views.places import view_moves, view_nodes_in_full, view_spares
from torchrelay.orchestrator.views.plans import PlanRefused
from torchrelay.orchestrator.views.scene import Scene
from torchrelay.orchestrator.views.story import Moment
from torchrelay.orchestrator.views.views import (
    view_audit,
    view_incident,
    view_incidents,
    view_job,
    view_nodes,
    view_ranks,
)
from torchrelay.orchestrator.views.why import why
from torchrelay.protocol.model.job import Job
from torchrelay.wire.messages.channel import AGENT_PATH
from torchrelay.wire.trust.trust import bearer_matches

VERSION = version("torchrelay")
KEEPALIVE_S = 5.0  # a comment on a silent event stream, so that both ends notice when the other is gone
MAX_BODY = 1 << 20

KNOWN = web.RequestKey("known", bool)  # whether the request has brought the token
# For those who may not know more: what is in the way names paths.
NOTHING_DECIDED = "nothing is decided at the moment; with the token of the run, `torchrelay status` says why"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
# What is listed of a job, by its path under /v1/jobs/{job}/.
OF_JOB: dict[str, Callable[[Scene, Job], Struct]] = {
    "ranks": view_ranks, "spares": view_spares, "moves": view_moves, "incidents": view_incidents,
}  # fmt: skip


def make_app(service: Orchestrator, token: str, strangers: Strangers | None = None) -> web.Application:
    """The web application: operators' API and agents' channel behind one port and one token.

    `strangers`: those who are connected and have not shown it.
    """

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        request[KNOWN] = bearer_matches(token, request.headers.get("Authorization"))
        if request[KNOWN] and strangers is not None:
            strangers.welcome(request.transport)
        if not request[KNOWN] and request.path != "/healthz":
            raise refusal(web.HTTPUnauthorized, "wrong or missing token: it is in the file `token` of the run's folder")
        return await handler(request)

    app = web.Application(middlewares=[guard], client_max_size=MAX_BODY)
    app[SERVICE] = service
    app.add_routes(
        [
            web.get("/healthz", get_health),
            web.get("/v1/status", get_status),
            web.get("/v1/nodes", get_nodes),
            *(web.get(f"/v1/jobs/{{job}}/{name}", of_job(view)) for name, view in OF_JOB.items()),
            web.get("/v1/jobs/{job}/why", get_why),
            web.get("/v1/incidents/{name}", get_incident),
            web.get("/v1/events", get_events),
            web.get("/v1/audit", get_audit),
            web.get("/v1/network", get_network),
            web.get("/metrics", get_metrics),
            *changes.ROUTES,
            web.get(AGENT_PATH, get_agent),
        ]
    )
    return app


# ---------------------------------------------------------------- looking


async def get_health(request: web.Request) -> web.Response:
    degraded = request.app[SERVICE].degraded
    told = degraded if request[KNOWN] or not degraded else NOTHING_DECIDED
    return answer({"ok": not degraded, "degraded": told}, 503 if degraded else 200)


def status_of(service: Orchestrator) -> Status:
    scene = service.scene()
    return Status(
        version=VERSION,
        pid=os.getpid(),
        at=scene.at(scene.now_ms),
        seq=service.journal.last_seq,
        degraded=service.degraded,
        lease=service.journal.lease,
        jobs=tuple(view_job(scene, job) for job in service.cluster.jobs.values()),
        nodes=view_nodes(scene),
    )


async def get_status(request: web.Request) -> web.Response:
    return answer(status_of(request.app[SERVICE]))


def of_job(view: Callable[[Scene, Job], Struct]) -> Handler:
    """Answers with this view of the job that the path names."""

    async def get(request: web.Request) -> web.Response:
        return answer(view(request.app[SERVICE].scene(), job_of(request)))

    return get


async def get_nodes(request: web.Request) -> web.Response:
    return answer(view_nodes_in_full(request.app[SERVICE].scene()))


async def get_why(request: web.Request) -> web.Response:
    try:
        return answer(why(request.app[SERVICE].scene(), job_of(request), request.query.get("about", "")))
    except PlanRefused as error:
        raise refusal(web.HTTPNotFound, str(error)) from error


async def get_audit(request: web.Request) -> web.Response:
    try:
        return answer(view_audit(request.app[SERVICE].journal.calls()))
    except JournalUnavailable as error:
        raise refusal(web.HTTPServiceUnavailable, str(error)) from error


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
    stream = web.StreamResponse(
        headers={
            "Content-Type": "text/event-stream", "Cache-Control": "no-store",
            "X-Torchrelay-Journal": service.journal.name,
        }
    )  # fmt: skip
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


async def get_agent(request: web.Request) -> web.StreamResponse:
    return await serve_agent(request, request.app[SERVICE])
