"""What the network core of a process (native/netpath) tells its agent: reports, and a page of figures.

A report is one JSON object in one unix datagram, below `MAX_REPORT` bytes, sent without waiting and dropped if nobody
reads. It is about a *link*: one of our paths, and an address of a peer. A page is a file `net-PID`, little endian:

    0    "TRNETST1", u64 sequence (odd while it is written), u64 updated (us since 1970), u32 pid, i32 rank (-1: none),
         u32 rows, u32 bytes of a row; up to 64 nothing
    64   rows: char interface[32], local[48], remote[48], u32 path, live (connections), state, round_trip (us),
         u64 sent_bytes, received_bytes, sent_again, duplicates, downs, ups, corrupt, down_since (us since 1970)

Both come from processes that run somebody's script: whatever does not fit is refused, never trusted.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator
from enum import IntEnum
from math import isfinite
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from torchrelay.wire.messages.codec import WireError

MAX_REPORT = 1024  # bytes; a report has fewer
REPORT_SOCKET = "net-report"  # in a node's folder; TORCHRELAY_NET_REPORT
STATS_FOLDER = "net"  # in a node's folder; TORCHRELAY_NET_STATS
PREFIX = "net-"  # of a page's name; the process id follows
MAGIC = b"TRNETST1"
MAX_ROWS = 63
MAX_PATHS = 64  # far more than any core has
_HEAD = struct.Struct("<8sQQIiII24x")
_ROW = struct.Struct("<32s48s48sIIIIQQQQQQQQ32x")
MAX_PAGE = _HEAD.size + MAX_ROWS * _ROW.size
MOST_COUNTED = (1 << 63) - 1  # nothing that is counted comes near it, and a message holds it
TRIES = 20  # to read a page while it is written

Text = Annotated[str, Meta(max_length=64)]
Number = Annotated[int, Meta(ge=0, le=MOST_COUNTED)]
WHATS = Literal["path_down", "path_up", "peer_unreachable", "peer_back", "corrupt", "gave_up"]
OF_A_LINK = ("path_down", "path_up", "corrupt")
OF_A_PEER = ("peer_unreachable", "peer_back", "gave_up")


class Report(Struct, frozen=True, kw_only=True):
    """One report. `ts` in seconds since 1970, `outage_ms` of `path_up` and `peer_back`."""

    v: Literal[1]
    what: WHATS
    ts: float
    pid: Annotated[int, Meta(gt=0, lt=1 << 31)]
    rank: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None
    path: Annotated[int, Meta(ge=0, lt=MAX_PATHS)] = 0
    interface: Text = ""
    local: Text = ""
    remote: Text = ""
    reason: Text = ""
    remotes: Annotated[tuple[Text, ...], Meta(max_length=MAX_PATHS)] = ()
    under_way: Number = 0
    outage_ms: Number = 0


_decoder = msgspec.json.Decoder(Report)


def decode_report(data: bytes) -> Report:
    """One datagram. Raises `WireError` for what is no report."""
    if len(data) >= MAX_REPORT:
        raise WireError(f"a report of {len(data)} bytes or more: it must be below {MAX_REPORT}")
    try:
        report = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not a report: {error}") from error
    if not isfinite(report.ts) or not 0 <= report.ts < 1e11:
        raise WireError(f"a report of the time {report.ts}")
    if report.what in OF_A_LINK and not (report.local and report.remote):
        raise WireError(f"{report.what} without both addresses")
    if report.what in OF_A_PEER and not report.remotes:
        raise WireError(f"{report.what} without the peer's addresses")
    printable(report.interface, report.local, report.remote, report.reason, *report.remotes)
    return report


def printable(*texts: str) -> None:
    """They reach logs, taints and terminals. Raises `WireError` if one has control characters in it."""
    for text in texts:
        if not text.isprintable():
            raise WireError(f"{text!r} is not printable")


# ---------------------------------------------------------------- pages


class RowState(IntEnum):
    """How it stands with a link. One that is up without a connection is not in use."""

    DOWN = 0
    UP = 1
    SUSPECT = 2


class Row(Struct, frozen=True, kw_only=True):
    """A link's figures, over all comms of the process that it ever had. `down_since_us`: since 1970; 0: it is up."""

    interface: str
    local: str
    remote: str
    path: int
    live: int  # connections
    state: RowState
    round_trip_us: int
    sent_bytes: int
    received_bytes: int
    sent_again: int  # chunks that went out once more
    duplicates: int  # chunks that arrived twice
    downs: int  # connections lost
    ups: int  # and made anew
    corrupt: int  # chunks with a wrong checksum
    down_since_us: int


class NetPage(Struct, frozen=True, kw_only=True):
    """All links of a process. `updated_us`: since 1970."""

    pid: int
    rank: int | None
    updated_us: int
    rows: tuple[Row, ...]

    @property
    def full(self) -> bool:
        """Whether there may be more links than rows."""
        return len(self.rows) >= MAX_ROWS


def decode_page(data: bytes) -> NetPage | None:
    """A page as it was read; None while it is being written, or made. Raises `WireError` for what is no page."""
    if len(data) < _HEAD.size:
        return None
    magic, sequence, updated, pid, rank, rows, row_bytes = _HEAD.unpack_from(data)
    if sequence == 0 or sequence % 2:
        return None
    if magic != MAGIC:
        raise WireError(f"not a page of the network core: it begins with {magic!r}")
    if row_bytes != _ROW.size or rows > MAX_ROWS or pid >= 1 << 31 or rank < -1:
        raise WireError(f"a page of process {pid} (rank {rank}) with {rows} rows of {row_bytes} bytes")
    if len(data) < _HEAD.size + rows * _ROW.size:
        raise WireError(f"a page of {len(data)} bytes is too short for {rows} rows")
    found = tuple(row_at(data, _HEAD.size + number * _ROW.size) for number in range(rows))
    return NetPage(pid=pid, rank=None if rank < 0 else rank, updated_us=updated, rows=found)


def row_at(data: bytes, offset: int) -> Row:
    """One row. Raises `WireError`."""
    interface, local, remote, path, live, state, round_trip, *counts = _ROW.unpack_from(data, offset)
    if state not in tuple(RowState) or path >= MAX_PATHS:
        raise WireError(f"a row of path {path} in state {state}")
    if max(counts) > MOST_COUNTED:
        raise WireError(f"a row of path {path} that counts to {max(counts)}")
    names = [text_in(name) for name in (interface, local, remote)]
    sent, received, again, twice, downs, ups, corrupt, since = counts
    return Row(
        interface=names[0],
        local=names[1],
        remote=names[2],
        path=path,
        live=live,
        state=RowState(state),
        round_trip_us=round_trip,
        sent_bytes=sent,
        received_bytes=received,
        sent_again=again,
        duplicates=twice,
        downs=downs,
        ups=ups,
        corrupt=corrupt,
        down_since_us=since,
    )


def text_in(field: bytes) -> str:
    """A name that ends with a NUL. Raises `WireError`."""
    try:
        text = field.partition(b"\0")[0].decode("ascii")
    except UnicodeDecodeError as error:
        raise WireError(f"{field!r} is no name") from error
    printable(text)
    return text


def encode_page(page: NetPage, sequence: int = 2) -> bytes:
    """The bytes of a page, as the core writes them: for whoever stands in for it."""
    rank = -1 if page.rank is None else page.rank
    head = _HEAD.pack(MAGIC, sequence, page.updated_us, page.pid, rank, len(page.rows), _ROW.size)
    return head + b"".join(
        _ROW.pack(
            row.interface.encode(),
            row.local.encode(),
            row.remote.encode(),
            row.path,
            row.live,
            row.state,
            row.round_trip_us,
            row.sent_bytes,
            row.received_bytes,
            row.sent_again,
            row.duplicates,
            row.downs,
            row.ups,
            row.corrupt,
            row.down_since_us,
        )
        for row in page.rows
    )


def read_page(path: Path) -> NetPage | None:
    """The page in a file; None if it is not there (any more), or never whole. Raises `WireError` if it is no page."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise WireError(f"{path} cannot be read: {error.strerror}") from error
    try:
        told = os.fstat(file)
        if not stat.S_ISREG(told.st_mode) or told.st_uid != os.getuid() or told.st_size > MAX_PAGE:
            raise WireError(f"{path} is no page: not a file of ours, or {told.st_size} bytes")
        for _ in range(TRIES):
            data = os.pread(file, MAX_PAGE, 0)
            # Written meanwhile: what was read is of two moments.
            if data[: _HEAD.size] == os.pread(file, _HEAD.size, 0) and (page := decode_page(data)) is not None:
                return page
        return None
    finally:
        os.close(file)


def pages_in(folder: Path) -> Iterator[tuple[int, Path]]:
    """The pages of a folder, with the process ids in their names. Raises `OSError` if there is no such folder."""
    for path in sorted(folder.iterdir()):
        number = path.name.removeprefix(PREFIX)
        if path.name.startswith(PREFIX) and number.isascii() and number.isdecimal() and len(number) < 10:
            yield int(number), path
