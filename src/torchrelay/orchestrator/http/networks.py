"""Networks: what agents tell of their nodes' network paths, for operators, and as figures for Prometheus.

    GET /v1/network    the paths of all nodes, with their links, findings and taints
    GET /metrics       the same as figures, in Prometheus' text format

The format is a line for each figure, and is written here: a library for it would be one more that every run needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from aiohttp import web

from torchrelay.api.shown import NetworkView, NodeNetwork
from torchrelay.orchestrator.core.service import Orchestrator
from torchrelay.orchestrator.http.answers import SERVICE, answer
from torchrelay.orchestrator.views.places import view_taints
from torchrelay.protocol.messages.ids import NodeId
from torchrelay.protocol.model.roster import natural
from torchrelay.wire.messages.pathnews import LinkNews, PathNews

TAINTS = "network/"  # keys of the taints that agents set for their paths
TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"  # the content type that Prometheus' servers know it by
STATES = ("up", "suspect", "down", "unreachable", "unused")
Labels = tuple[tuple[str, str], ...]
Sample = tuple[Labels, float]


# ---------------------------------------------------------------- as values


def view_network(service: Orchestrator) -> NetworkView:
    """What was told of each node last."""
    now = service.clock.now_ms()
    names = sorted(service.networks, key=natural)
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
        link.live, link.round_trip_us / 1e6, link.flaps, link.sent_bytes, link.received_bytes, link.sent_again,
        link.duplicates, link.corrupt,
    )  # fmt: skip


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
        ("node", node), ("path", str(path.path)), ("interface", path.interface), ("local", path.local),
        ("remote", link.remote),
    )  # fmt: skip


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
            ("heard", one.news.reports), ("malformed", one.news.malformed), ("strangers", one.news.strangers)
        )
    ]  # fmt: skip


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
