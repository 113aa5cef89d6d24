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
                                       (event `degraded`: why nothing is decided at the moment, "" when it is again;
                                       event `remark`: what differs between the machines)
    GET  /v1/head, /v1/lines           for whoever follows a run from elsewhere, see `following`
    GET  /v1/launch                    what is to be run, for agents
    GET  /heir                         the journal, for nodes that may take this one's place (a WebSocket)
    GET  /healthz                      200 while decisions are made, 503 while they are not

Calls that change something are in `changes` and `parking`. Errors are `{"error": "what is wrong and what to do"}`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable, Iterator
from importlib.metadata import version
from pathlib import Path

import msgspec
from aiohttp import web
from msgspec import Struct

from torchrelay.api.endpoint import LOGS
from torchrelay.api.shown import NetworkView, NodeNetwork, Status
from torchrelay.orchestrator.core.agents import Estate, Sameness, serve_agent, serve_heir
from torchrelay.orchestrator.core.heirs import safe
from torchrelay.orchestrator.core.service import Orchestrator
from torchrelay.orchestrator.http import changes, following, parking
from torchrelay.orchestrator.http.answers import SERVICE, answer, job_of, refusal
from torchrelay.orchestrator.http.door import Strangers
from torchrelay.orchestrator.http.following import READING, RUN_DIR
from torchrelay.orchestrator.http.keys import Keys
from torchrelay.orchestrator.store.journal import JournalUnavailable
from torchrelay.orchestrator.store.output import Output
from torchrelay.orchestrator.views.places import view_moves, view_nodes_in_full, view_spares, view_taints
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
from torchrelay.protocol.messages.ids import NodeId
from torchrelay.protocol.model.job import Job
from torchrelay.protocol.model.roster import natural_key
from torchrelay.wire.files.launch import read_launch
from torchrelay.wire.messages.channel import AGENT_PATH, LAUNCH_PATH
from torchrelay.wire.messages.inheritance import HEIR_PATH
from torchrelay.wire.messages.pathnews import LinkNews, PathNews

VERSION = version("torchrelay")
KEEPALIVE_S = 5.0  # a comment on a silent event stream, so that both ends notice when the other is gone
MAX_BODY = 1 << 20

ESTATE: web.AppKey[Estate] = web.AppKey("estate", Estate)
SAMENESS: web.AppKey[Sameness] = web.AppKey("sameness", Sameness)
OUTPUT: web.AppKey[Output] = web.AppKey("output", Output)
KNOWN = web.RequestKey("known", bool)  # whether the request has brought the token
# For those who may not know more: what is in the way names paths.
NOTHING_DECIDED = "nothing is decided at the moment; with the token of the run, `torchrelay status` says why"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
# What is listed of a job, by its path under /v1/jobs/{job}/.
OF_JOB: dict[str, Callable[[Scene, Job], Struct]] = {
    "ranks": view_ranks, "spares": view_spares, "moves": view_moves, "incidents": view_incidents,
}  # fmt: skip


def make_app(
    service: Orchestrator,
    keys: Keys,
    strangers: Strangers | None = None,
    run_dir: Path | None = None,
    estate: Estate | None = None,
) -> web.Application:
    """The web application: operators' API and agents' channel behind one port.

    `strangers`: those who are connected and have not shown a token. `run_dir`: where it stands what is to be run.
    """

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        held = keys.held(request)
        request[KNOWN] = bool(held)
        if held and strangers is not None:
            strangers.welcome(request.transport)
        if request.path != "/healthz" and (refused := keys.refusal(request, held)):
            keys.complain(request, refused[1])
            raise refusal(*refused)
        return await handler(request)

    app = web.Application(middlewares=[guard], client_max_size=MAX_BODY)
    app[SERVICE] = service
    app[SAMENESS], app[READING] = Sameness(), set()
    if estate is not None:
        app[ESTATE] = estate
    if run_dir is not None:
        app[RUN_DIR] = run_dir
        app[OUTPUT] = Output(run_dir / LOGS)
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
            *(*changes.ROUTES, *parking.ROUTES, *following.ROUTES),
            web.get(AGENT_PATH, get_agent),
            web.get(LAUNCH_PATH, get_launch),
            web.get(HEIR_PATH, get_heir),
        ]
    )
    return app


# ---------------------------------------------------------------- looking


async def get_health(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    degraded = service.degraded
    told = degraded if request[KNOWN] or not degraded else NOTHING_DECIDED
    lease = {"lease": service.journal.lease} if request[KNOWN] else {}
    return answer({"ok": not degraded, "degraded": told, **lease}, 503 if degraded else 200)


def status_of(service: Orchestrator, remarks: tuple[str, ...] = ()) -> Status:
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
        remarks=remarks,
    )


async def get_status(request: web.Request) -> web.Response:
    return answer(status_of(request.app[SERVICE], request.app[SAMENESS].remarks))


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
        for incident in job.accounting.incidents
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
            "Content-Type": "text/event-stream",
            "Cache-Control": "no-store",
            "X-Torchrelay-Journal": service.journal.name,
        }
    )
    await stream.prepare(request)
    try:
        await tell_all(service, stream, since, request.app[SAMENESS])
    except ConnectionError:
        pass  # the reader has gone
    return stream


async def tell_all(service: Orchestrator, stream: web.StreamResponse, since: int, sameness: Sameness) -> None:
    """Everything after `since`, for as long as the service runs; and whenever it becomes degraded or well again."""
    degraded = ""
    remarked: set[str] = set()
    while not service.over:
        news = service.news
        if service.degraded != degraded:
            degraded = service.degraded
            await stream.write(b"event: degraded\ndata: %b\n\n" % msgspec.json.encode(degraded))
        for remark in [one for one in sameness.remarks if one not in remarked]:
            remarked.add(remark)
            await stream.write(b"event: remark\ndata: %b\n\n" % msgspec.json.encode(remark))
        fresh = service.moments.after(since)
        if fresh and await safe(service):
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


async def get_launch(request: web.Request) -> web.Response:
    """What is to be run, as `torchrelay run` wrote it down."""
    if RUN_DIR not in request.app:
        raise refusal(web.HTTPNotFound, "this orchestrator was not told what is to be run")
    try:
        launch = await asyncio.to_thread(read_launch, request.app[RUN_DIR])
    except ValueError as error:
        raise refusal(web.HTTPServiceUnavailable, str(error)) from error
    return answer(launch)


async def get_heir(request: web.Request) -> web.StreamResponse:
    if ESTATE not in request.app:
        raise refusal(web.HTTPNotFound, "nobody takes this orchestrator's place: its run is on one machine")
    return await serve_heir(request, request.app[SERVICE], request.app[ESTATE])


async def get_agent(request: web.Request) -> web.StreamResponse:
    return await serve_agent(request, request.app[SERVICE], request.app.get(OUTPUT), request.app[SAMENESS])


# ---------------------------------------------------------------- the nodes' network paths

# What agents tell of their nodes' network paths, for operators, and as figures for Prometheus.
#
#     GET /v1/network    the paths of all nodes, with their links, findings and taints
#     GET /metrics       the same as figures, in Prometheus' text format
#
# The format is a line for each figure, and is written here: a library for it would be one more that every run needs.

TAINTS = "network/"  # keys of the taints that agents set for their paths
TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"  # the content type that Prometheus' servers know it by
STATES = ("up", "suspect", "down", "unreachable", "unused")
Labels = tuple[tuple[str, str], ...]
Sample = tuple[Labels, float]


# ---------------------------------------------------------------- as values


def view_network(service: Orchestrator) -> NetworkView:
    """What was told of each node last."""
    now = service.clock.now_ms()
    names = sorted(service.networks, key=natural_key)
    return NetworkView(nodes=tuple(view_node(service, node, now) for node in names))


def view_node(service: Orchestrator, name: NodeId, now_ms: int) -> NodeNetwork:
    heard_ms, news = service.networks[name]
    node = service.cluster.nodes.get(name)
    taints = tuple(taint for taint in view_taints(service.scene(), name) if taint.key.startswith(TAINTS))
    alive = node is not None and node.alive
    return NodeNetwork(node=name, alive=alive, age_s=max(0, now_ms - heard_ms) / 1000, news=news, taints=taints)


async def get_network(request: web.Request) -> web.Response:
    return answer(view_network(request.app[SERVICE]))


# ---------------------------------------------------------------- as figures


async def get_metrics(request: web.Request) -> web.Response:
    text = metrics(view_network(request.app[SERVICE]))
    return web.Response(body=text.encode(), headers={"Content-Type": TEXT_FORMAT})


LINK_METRICS: tuple[tuple[str, str, str], ...] = (
    ("link_connections", "gauge", "Connections of a link: one path to one address of a peer."),
    ("link_round_trip_seconds", "gauge", "The longest round trip of a link, as measured last."),
    ("link_flaps", "gauge", "How often a link was lost within the last hour (--net-window)."),
    ("link_sent_bytes_total", "counter", "Bytes sent over a link since its agent began to listen."),
    ("link_received_bytes_total", "counter", "Bytes received over a link since its agent began to listen."),
    ("link_chunks_sent_again_total", "counter", "Chunks that went out once more, as their path was lost or silent."),
    ("link_duplicate_chunks_total", "counter", "Chunks that arrived twice and were dropped."),
    ("link_corrupt_chunks_total", "counter", "Chunks whose checksum was wrong."),
)


def figures(link: LinkNews) -> tuple[float, ...]:
    """Those of `LINK_METRICS`, in their order."""
    return (
        link.live,
        link.round_trip_us / 1e6,
        link.flaps,
        link.sent_bytes,
        link.received_bytes,
        link.sent_again,
        link.duplicates,
        link.corrupt,
    )


def metrics(view: NetworkView) -> str:
    """All of it in Prometheus' text format. Of a node that is gone there is nothing but how old its last news are."""
    ages: list[Sample] = [((("node", one.node),), one.age_s) for one in view.nodes]
    view = NetworkView(nodes=tuple(one for one in view.nodes if one.alive))
    links = [
        (labels_of(one.node, path, link), link) for one in view.nodes for path in one.news.paths for link in path.links
    ]
    lines = [*metric("link_state", "gauge", "1 for the state that a link is in, 0 for the others.", states(links))]
    for place, (name, kind, text) in enumerate(LINK_METRICS):
        lines += metric(name, kind, text, [(labels, figures(link)[place]) for labels, link in links])
    lines += metric("path_at_fault", "gauge", "1 while a path is found at fault.", faults(view))
    lines += metric("reports_total", "counter", "Reports that an agent has heard, or dropped.", reports(view))
    lines += metric("news_age_seconds", "gauge", "How old what is known of a node's paths is.", ages)
    return "".join(f"{line}\n" for line in lines)


def labels_of(node: NodeId, path: PathNews, link: LinkNews) -> Labels:
    return (
        ("node", node),
        ("path", str(path.path)),
        ("interface", path.interface),
        ("local", path.local),
        ("remote", link.remote),
    )


def states(links: Iterable[tuple[Labels, LinkNews]]) -> list[Sample]:
    return [((*labels, ("state", state)), float(link.state == state)) for labels, link in links for state in STATES]


def faults(view: NetworkView) -> list[Sample]:
    found: list[Sample] = []
    for one in view.nodes:
        for path in one.news.paths:
            if path.finding is not None:
                place = (("node", str(one.node)), ("interface", path.interface), ("local", path.local))
                found.append(((*place, ("kind", path.finding.kind), ("where", path.finding.where)), 1.0))
    return found


def reports(view: NetworkView) -> list[Sample]:
    return [
        ((("node", one.node), ("what", what)), count)
        for one in view.nodes
        for what, count in (
            ("heard", one.news.reports),
            ("malformed", one.news.malformed),
            ("strangers", one.news.strangers),
        )
    ]


def metric(name: str, kind: str, text: str, samples: list[Sample]) -> Iterator[str]:
    """The lines of one metric; none at all if it has no samples."""
    whole = f"torchrelay_network_{name}"
    if samples:
        yield f"# HELP {whole} {text}"
        yield f"# TYPE {whole} {kind}"
    for labels, value in samples:
        told = ",".join(f'{key}="{escaped(each)}"' for key, each in labels)
        yield f"{whole}{{{told}}} {int(value) if value == int(value) else value}"


def escaped(text: str) -> str:
    """A label's value: backslashes, quotes and line breaks."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
