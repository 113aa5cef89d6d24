"""Net pages: the network paths of this machine's processes, from the pages that they keep, without anybody's help."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from torchrelay.api.shown import NetworkView, NodeNetwork
from torchrelay.client.runs import NotPossible
from torchrelay.protocol.messages.ids import NodeId
from torchrelay.terminal.show import remark
from torchrelay.wire.messages.codec import WireError
from torchrelay.wire.messages.netreport import STATS_FOLDER, NetPage, Row, RowState, pages_in, read_page
from torchrelay.wire.messages.pathnews import LinkNews, NetworkNews, PathNews

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
