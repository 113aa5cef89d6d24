"""`torchrelay net status`: the network paths of all nodes, or of the processes on this machine."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from torchrelay.cli.client import Away, Client
from torchrelay.cli.runs import NotPossible, find_run
from torchrelay.cli.show import Output, milliseconds, remark, show, show_json, table
from torchrelay.cli.words import add_output
from torchrelay.orchestrator.shown import NetworkView, NodeNetwork, size_text, span
from torchrelay.protocol.ids import NodeId
from torchrelay.wire.codec import WireError
from torchrelay.wire.netreport import STATS_FOLDER, NetPage, Row, RowState, pages_in, read_page
from torchrelay.wire.pathnews import LinkNews, NetworkNews, PathNews

HEADS = (
    "node", "path", "local", "peer", "state", "for", "sent/s", "received/s", "round trip", "flaps", "again", "corrupt",
    "taint",
)  # fmt: skip
OLD_S = 15.0  # agents tell more often than this
LOOK_S = 1.0  # between the two looks at the pages from which rates are made
Key = tuple[int, str, str, str]  # path, interface, local, remote


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
        view = of_pages(given.local) if given.local is not None else of_run(given.run_dir)
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


# ---------------------------------------------------------------- from the pages themselves


def of_pages(folder: Path) -> NetworkView:
    """What the processes of this machine say themselves, by folder. Raises `NotPossible` if there are no pages."""
    all_folders = (folder, folder / STATS_FOLDER, *sorted(folder.glob(f"*/{STATS_FOLDER}")))
    folders = [one for one in all_folders if has_pages(one)]
    if not folders:
        what = "name the folder that TORCHRELAY_NET_STATS is for a process that runs"
        raise NotPossible(f"no pages of the network core in {folder}: {what}")
    before = [(time.monotonic(), pages_of(one)) for one in folders]
    time.sleep(LOOK_S)
    nodes = []
    for one, (then, first) in zip(folders, before, strict=True):
        now, pages = time.monotonic(), pages_of(one)
        news = NetworkNews(paths=paths_of(first, pages, now - then), processes=len(pages))
        name = one.absolute().parent.name if one.name == STATS_FOLDER else one.absolute().name
        nodes.append(NodeNetwork(node=NodeId(name), alive=True, age_s=0.0, news=news))
    return NetworkView(nodes=tuple(nodes))


def has_pages(folder: Path) -> bool:
    try:
        return any(True for _ in pages_in(folder))
    except OSError:
        return False


def pages_of(folder: Path) -> dict[int, NetPage]:
    """The pages that can be read, by process."""
    found = {}
    try:
        for pid, path in pages_in(folder):
            try:
                page = read_page(path)
            except WireError as error:
                remark(str(error))
                continue
            if page is not None:
                found[pid] = page
    except OSError as error:  # its last process has ended, and its agent
        remark(f"{folder}: {error.strerror}")
    return found


def paths_of(before: dict[int, NetPage], now: dict[int, NetPage], seconds: float) -> tuple[PathNews, ...]:
    """All links of all processes, put together."""
    rows: dict[Key, list[Row]] = {}
    rates: dict[Key, tuple[float, float]] = {}
    for pid, page in now.items():
        earlier = {key_of(row): row for row in before[pid].rows} if pid in before else {}
        for row in page.rows:
            key = key_of(row)
            rows.setdefault(key, []).append(row)
            old = earlier.get(key, row)
            sent, received = rates.get(key, (0.0, 0.0))
            sent += max(0, row.sent_bytes - old.sent_bytes) / seconds
            rates[key] = (sent, received + max(0, row.received_bytes - old.received_bytes) / seconds)
    updated = max((page.updated_us for page in now.values()), default=0)
    paths: dict[tuple[int, str, str], list[LinkNews]] = {}
    for key in sorted(rows):
        paths.setdefault(key[:3], []).append(link_of(key[3], rows[key], rates[key], updated))
    return tuple(
        PathNews(path=path, interface=interface, local=local, links=tuple(links))
        for (path, interface, local), links in paths.items()
    )


def key_of(row: Row) -> Key:
    return row.path, row.interface, row.local, row.remote


def link_of(remote: str, rows: Sequence[Row], rates: tuple[float, float], updated_us: int) -> LinkNews:
    """One link as several processes have it: it is down if all who use it say so."""
    used = [row for row in rows if row.live or row.state is RowState.DOWN]
    up = [row.state for row in used if row.state is not RowState.DOWN]
    state = "unused" if not used else "down" if not up else "up" if RowState.UP in up else "suspect"
    since = max(row.down_since_us for row in used) if state == "down" else 0
    return LinkNews(
        remote=remote, state=state, state_s=max(0, updated_us - since) / 1e6 if since else 0.0,
        live=sum(row.live for row in rows), round_trip_us=max(row.round_trip_us for row in rows),
        sent_rate=rates[0], received_rate=rates[1], sent_bytes=sum(row.sent_bytes for row in rows),
        received_bytes=sum(row.received_bytes for row in rows), sent_again=sum(row.sent_again for row in rows),
        duplicates=sum(row.duplicates for row in rows), corrupt=sum(row.corrupt for row in rows),
    )  # fmt: skip
