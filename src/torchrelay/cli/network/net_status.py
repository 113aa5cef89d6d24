"""`torchrelay net status`: the network paths of all nodes, or of the processes on this machine."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from torchrelay.api.shown import NetworkView, NodeNetwork, size_text, span
from torchrelay.client.client import Away, Client
from torchrelay.client.runs import NotPossible, find_run
from torchrelay.terminal.show import Output, milliseconds, remark, show, show_json, table
from torchrelay.terminal.words import add_output
from torchrelay.wire.messages.pathnews import LinkNews, PathNews

HEADS = (
    "node", "path", "local", "peer", "state", "for", "sent/s", "received/s", "round trip", "flaps", "again", "corrupt",
    "taint",
)  # fmt: skip
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

    def page() -> str:
        if given.local is None:
            view = of_run(given.run_dir)
        else:
            from torchrelay.cli.network.net_pages import of_pages  # needs what else only agents load

            view = of_pages(given.local)
        return show_json(view) if given.output is Output.JSON else network_page(view)

    show(page, watch=given.watch)
    return 0


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


def network_page(view: NetworkView) -> str:
    """A line for each link, then what is wrong."""
    rows = [row_of(node, path, link) for node in view.nodes for path in node.news.paths for link in path.links]
    if not rows:
        return "no process has used the network core yet"
    return "\n".join([table(HEADS, rows), *remarks(view.nodes)])


def row_of(node: NodeNetwork, path: PathNews, link: LinkNews) -> tuple[object, ...]:
    finding = path.finding
    return (
        node.node,
        f"{path.path} {path.interface}".strip(),
        path.local,
        link.remote,
        f"{link.state} ({link.reason})" if link.reason and link.state == "down" else link.state,
        span(link.state_s) if link.state_s else None,
        size_text(round(link.sent_rate)),
        size_text(round(link.received_rate)),
        milliseconds(link.round_trip_us / 1000) if link.round_trip_us else None,
        link.flaps,
        link.sent_again,
        link.corrupt,
        "" if finding is None else finding.taint or f"none ({finding.where})",
    )


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
