"""`torchrelay net status`: the network paths of all nodes, or of the processes on this machine."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from torchrelay.api.shown import NetworkView, NodeNetwork, size_text, span
from torchrelay.cli.listing import Column, View
from torchrelay.client.client import Away, Client
from torchrelay.client.runs import NotPossible, find_run
from torchrelay.terminal.show import Output, milliseconds, remark
from torchrelay.terminal.words import add_output
from torchrelay.wire.messages.pathnews import LinkNews, PathNews

OLD_S = 15.0  # agents tell more often than this


def add_net_status(parser: argparse.ArgumentParser) -> None:
    """The words of the verb."""
    parser.add_argument("--run-dir", type=Path, help="the run's folder (the newest under ./torchrelay-runs)")
    parser.add_argument(
        "--local", type=Path, metavar="FOLDER",
        help="do not ask the orchestrator: read the pages that processes on this machine keep (TORCHRELAY_NET_STATS, "
        "or a folder above it)",
    )  # fmt: skip
    parser.add_argument("-w", "--watch", action="store_true", help="again every second, until Ctrl-C")
    add_output(parser, Output.TABLE, Output.JSON)


def show_net_status(given: argparse.Namespace) -> int:
    """Print the paths. Returns 0; raises `NotPossible` if there is nobody to tell of them."""
    LINKS.show(given)
    return 0


def paths_of(given: argparse.Namespace) -> NetworkView:
    """The paths of a run, or those of this machine's processes. Raises `NotPossible`."""
    if given.local is None:
        return of_run(given.run_dir)
    from torchrelay.cli.network.net_pages import of_pages  # needs what else only agents load

    return of_pages(given.local)


def of_run(run_dir: Path | None) -> NetworkView:
    """What the orchestrator knows. Raises `NotPossible`."""
    found = find_run(run_dir)
    try:
        view = Client.of(found).view_network()
    except Away as error:
        instead = "paths are not in the journal; `--local FOLDER` reads them on this machine"
        raise NotPossible(f"{error}: {instead}") from error
    if not view.nodes:
        raise NotPossible(f"no agent of {found} watches network paths: start the run with --net-failover")
    for node in view.nodes:
        if node.age_s > OLD_S:
            remark(f"{node.node}: what is shown is {span(node.age_s)} old, its agent has not told anything since")
    return view


# ---------------------------------------------------------------- for people


class Link(NamedTuple):
    """A row: a link of a path of a node."""

    node: NodeNetwork
    path: PathNews
    news: LinkNews


def links_of(view: NetworkView) -> list[Link]:
    return [Link(node, path, link) for node in view.nodes for path in node.news.paths for link in path.links]


def state_text(one: Link) -> str:
    down = one.news.reason and one.news.state == "down"
    return f"{one.news.state} ({one.news.reason})" if down else one.news.state


def taint_text(one: Link) -> str:
    finding = one.path.finding
    return "" if finding is None else finding.taint or f"none ({finding.where})"


def network_page(view: NetworkView) -> str:
    """A line for each link, then what is wrong."""
    return LINKS.page(view)


def remarks(nodes: Iterable[NodeNetwork]) -> list[str]:
    """Paths at fault with the evidence, and what agents have dropped."""
    lines = []
    for node in nodes:
        news = node.news
        for path in news.paths:
            if path.finding is not None:
                lines.append(f"{node.node}: {path.finding.evidence} (found {span(path.finding.for_s)} ago)")
        lines += [f"{node.node}: {taint.text} by {taint.source}" for taint in node.taints]
        if news.malformed + news.strangers:
            lines.append(
                f"{node.node}: dropped {news.malformed} that were no reports, and {news.strangers} of strangers"
            )
        if news.left_out:
            lines.append(f"{node.node}: words on {news.left_out} links too many were dropped")
    return ["", *lines] if lines else []


LINKS: View[NetworkView, Link] = View(
    "net status",
    fetch=paths_of,
    rows=links_of,
    columns=(
        Column("node", lambda one: one.node.node),
        Column("path", lambda one: f"{one.path.path} {one.path.interface}".strip()),
        Column("local", lambda one: one.path.local),
        Column("peer", lambda one: one.news.remote),
        Column("state", state_text),
        Column("for", lambda one: span(one.news.state_s) if one.news.state_s else None),
        Column("sent/s", lambda one: size_text(round(one.news.sent_rate))),
        Column("received/s", lambda one: size_text(round(one.news.received_rate))),
        Column(
            "round trip", lambda one: milliseconds(one.news.round_trip_us / 1000) if one.news.round_trip_us else None
        ),
        Column("flaps", lambda one: one.news.flaps),
        Column("again", lambda one: one.news.sent_again),
        Column("corrupt", lambda one: one.news.corrupt),
        Column("taint", taint_text),
    ),
    empty=lambda _: "no process has used the network core yet",
    below=lambda view: remarks(view.nodes),
)
