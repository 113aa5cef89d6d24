"""`torchrelay net`: the network part: where it is, what switches it on, and how its paths are."""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from torchrelay.api.shown import NetworkView, NodeNetwork, size_text, span_text
from torchrelay.cli.launch.net_flags import for_ports
from torchrelay.cli.listing import Column, View
from torchrelay.cli.registry import VERBS
from torchrelay.client.client import Away, Client
from torchrelay.client.runs import Far, NotPossible, find_run, from_afar
from torchrelay.netpath.native import environment
from torchrelay.netpath.native.library import NotBuilt, find
from torchrelay.protocol.messages.ids import NodeId
from torchrelay.terminal.show import Output, milliseconds, remark, show_json
from torchrelay.terminal.words import add_output
from torchrelay.wire.messages.codec import WireError
from torchrelay.wire.messages.netreport import STATS_FOLDER, NetPage, Row, RowState, pages_in, read_page
from torchrelay.wire.messages.pathnews import LinkNews, NetworkNews, PathNews

EXAMPLES = """
eval "$(torchrelay net env)"          NCCL and RCCL take the plugin; torchrelay run --net-failover does it for its ranks
torchrelay net env --ib               NCCL's own failover between InfiniBand or RoCE ports; or run --ib-failover
torchrelay net status -w              the paths of all nodes, again every second
"""
_IB = "instead: NCCL's own failover between InfiniBand or RoCE ports (NCCL 2.29.7; recovery of ports: 2.30.3)"


def net(words: list[str]) -> int:
    """Carry out `torchrelay net WORDS`. Returns the exit code; raises `NotPossible`."""
    given = parser().parse_args(words)
    try:
        if given.what == "path":
            print(find())
        elif given.what == "env":
            show_environment(given)
        else:
            return show_net_status(given)
    except NotBuilt as error:
        raise NotPossible(str(error), 2) from error
    return 0


def parser() -> argparse.ArgumentParser:
    """The words after `torchrelay net`."""
    parser = argparse.ArgumentParser(
        prog="torchrelay net",
        description=f"{VERBS['net'].help.capitalize()}.",
        epilog=EXAMPLES,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    whats = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    env_help = 'variables that switch it on for NCCL and RCCL: eval "$(torchrelay net env)"'
    env = whats.add_parser("env", help=env_help, description=env_help, allow_abbrev=False)
    env.add_argument("--ib", action="store_true", help=_IB)
    env.add_argument(
        "--merge", metavar="DEVICES", help="with --ib: which ports back each other: mlx5_0,mlx5_1;mlx5_2,mlx5_3"
    )
    add_output(env, Output.TABLE, Output.JSON)
    path_help = "where the plugin is, for NCCL_NET_PLUGIN"
    whats.add_parser("path", help=path_help, description=path_help, allow_abbrev=False)
    status_help = "the paths of all nodes: peers, rates, losses"
    add_net_status(whats.add_parser("status", help=status_help, description=status_help, allow_abbrev=False))
    return parser


def show_environment(given: argparse.Namespace) -> None:
    """Print the variables as a shell takes them, or as JSON. Raises `NotPossible`, `NotBuilt`."""
    if given.ib:
        variables = for_ports(given.merge)
    elif given.merge is not None:
        raise NotPossible("--merge is for --ib: our plugin finds its paths itself (TORCHRELAY_NET_PATHS names them)", 2)
    else:
        variables = environment.plugin()
    if given.output is Output.JSON:
        print(show_json(variables))
    else:
        for name, value in variables.items():
            print(f"export {name}={shlex.quote(value)}")


# ---------------------------------------------------------------- status

# `torchrelay net status`: the network paths of all nodes, or of the processes on this machine.

OLD_S = 15.0  # agents tell more often than this


def add_net_status(parser: argparse.ArgumentParser) -> None:
    """The words of the verb."""
    parser.add_argument("--run-dir", type=Path, help="the run's folder (the newest under ./torchrelay-runs)")
    parser.add_argument(
        "--local",
        type=Path,
        metavar="FOLDER",
        help="do not ask the orchestrator: read the pages that processes on this machine keep (TORCHRELAY_NET_STATS, "
        "or a folder above it)",
    )
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

    return of_pages(given.local)


def of_run(run_dir: Path | Far | None) -> NetworkView:
    """What the orchestrator knows. Raises `NotPossible`."""
    found = run_dir.url if isinstance(run_dir, Far) else find_run(run_dir)
    try:
        client = from_afar(run_dir)[0] if isinstance(run_dir, Far) else Client.of(find_run(run_dir))
        view = client.view_network()
    except Away as error:
        instead = "paths are not in the journal; `--local FOLDER` reads them on this machine"
        raise NotPossible(f"{error}: {instead}") from error
    if not view.nodes:
        raise NotPossible(f"no agent of {found} watches network paths: start the run with --net-failover")
    for node in view.nodes:
        if node.age_s > OLD_S:
            remark(f"{node.node}: what is shown is {span_text(node.age_s)} old, its agent has not told anything since")
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
                lines.append(f"{node.node}: {path.finding.evidence} (found {span_text(path.finding.for_s)} ago)")
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
        Column("for", lambda one: span_text(one.news.state_s) if one.news.state_s else None),
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


# ---------------------------------------------------------------- pages

# The network paths of this machine's processes, from the pages that they keep, without anybody's help.

LOOK_S = 1.0  # between the two looks from which rates are made
Key = tuple[int, str, str, str]  # path, interface, local, remote


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
        news = NetworkNews(paths=rows_of_paths(first, pages, now - then), processes=len(pages))
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


def rows_of_paths(before: dict[int, NetPage], now: dict[int, NetPage], seconds: float) -> tuple[PathNews, ...]:
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
        remote=remote,
        state=state,
        state_s=max(0, updated_us - since) / 1e6 if since else 0.0,
        live=sum(row.live for row in rows),
        round_trip_us=max(row.round_trip_us for row in rows),
        sent_rate=rates[0],
        received_rate=rates[1],
        sent_bytes=sum(row.sent_bytes for row in rows),
        received_bytes=sum(row.received_bytes for row in rows),
        sent_again=sum(row.sent_again for row in rows),
        duplicates=sum(row.duplicates for row in rows),
        corrupt=sum(row.corrupt for row in rows),
    )
