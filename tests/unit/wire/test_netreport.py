"""What the network core tells: reports and pages are read as they were written, and what is neither is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrelay.wire.messages.codec import WireError
from torchrelay.wire.messages.netreport import (
    MAX_PAGE,
    MAX_REPORT,
    MAX_ROWS,
    NetPage,
    Row,
    RowState,
    decode_page,
    decode_report,
    encode_page,
    pages_in,
    read_page,
)

# As the core's documentation shows it.
SHOWN = (
    b'{"v":1,"what":"path_down","ts":1750000000.123,"pid":1,"rank":3,"path":0,"interface":"eth1","local":"10.0.1.1",'
    b'"remote":"10.0.1.2","reason":"silent","under_way":4}'
)
TEXTS = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=31)
COUNTS = st.integers(0, 2**63 - 1)
ROWS = st.builds(
    Row,
    interface=TEXTS,
    local=TEXTS,
    remote=TEXTS,
    path=st.integers(0, 63),
    live=st.integers(0, 2**32 - 1),
    state=st.sampled_from(RowState),
    round_trip_us=st.integers(0, 2**32 - 1),
    sent_bytes=COUNTS,
    received_bytes=COUNTS,
    sent_again=COUNTS,
    duplicates=COUNTS,
    downs=COUNTS,
    ups=COUNTS,
    corrupt=COUNTS,
    down_since_us=COUNTS,
)
PAGES = st.builds(
    NetPage,
    pid=st.integers(1, 2**31 - 1),
    rank=st.none() | st.integers(0, 2**31 - 1),
    updated_us=COUNTS,
    rows=st.lists(ROWS, max_size=MAX_ROWS).map(tuple),
)


def told(**changes: Any) -> bytes:
    return json.dumps({**json.loads(SHOWN), **changes}).encode()


class TestReports:
    def test_one_is_read_as_the_core_writes_it(self) -> None:
        report = decode_report(SHOWN)
        assert (report.what, report.ts, report.pid, report.rank) == ("path_down", 1750000000.123, 1, 3)
        assert (report.path, report.interface, report.local, report.remote) == (0, "eth1", "10.0.1.1", "10.0.1.2")
        assert (report.reason, report.under_way) == ("silent", 4)

    def test_a_rank_may_be_unknown_and_new_facts_may_come(self) -> None:
        assert decode_report(told(rank=None, comm="0af3", news=[1])).rank is None

    def test_one_of_a_peer_names_its_addresses(self) -> None:
        text = b'{"v":1,"what":"peer_unreachable","ts":1,"pid":7,"rank":null,"remotes":["10.0.1.2","10.0.2.2"]}'
        assert decode_report(text).remotes == ("10.0.1.2", "10.0.2.2")
        with pytest.raises(WireError, match="without the peer's addresses"):
            decode_report(b'{"v":1,"what":"peer_back","ts":1,"pid":7}')

    @pytest.mark.parametrize(
        "changes",
        [
            {"v": 2}, {"v": "1"}, {"what": "path_sideways"}, {"pid": 0}, {"pid": -5}, {"pid": 2**31}, {"pid": "1"},
            {"rank": -1}, {"rank": 1.5}, {"path": -1}, {"path": 64}, {"local": ""}, {"remote": ""},
            {"remote": "x" * 65}, {"local": "10.0.1.1\n"}, {"interface": "\x1b[31m"}, {"reason": "\x00"},
            {"under_way": -1}, {"outage_ms": 2**63}, {"remotes": ["x"] * 65}, {"ts": -1}, {"ts": 1e12}, {"ts": None},
        ],
        ids=str,
    )  # fmt: skip
    def test_what_does_not_fit_is_refused(self, changes: dict[str, Any]) -> None:
        with pytest.raises(WireError):
            decode_report(told(**changes))

    def test_one_that_is_too_long_is_refused_and_the_longest_is_not(self) -> None:
        room = MAX_REPORT - len(told(more="")) - 1
        assert decode_report(told(more="x" * room)).pid == 1
        with pytest.raises(WireError, match="must be below 1024"):
            decode_report(told(more="x" * (room + 1)))

    @given(st.binary(max_size=MAX_REPORT + 10))
    def test_any_bytes_are_refused_in_words(self, data: bytes) -> None:
        with pytest.raises(WireError):
            decode_report(data)

    @given(st.integers(0, len(SHOWN) - 1), st.integers(0, 255))
    def test_a_damaged_one_is_read_or_refused(self, place: int, byte: int) -> None:
        try:
            decode_report(SHOWN[:place] + bytes([byte]) + SHOWN[place + 1 :])
        except WireError:
            pass


class TestPages:
    @given(PAGES)
    def test_a_page_is_read_as_it_was_written(self, page: NetPage) -> None:
        assert decode_page(encode_page(page)) == page

    def test_its_layout_is_that_of_the_core(self) -> None:
        row = Row(
            interface="eth1",
            local="10.0.1.1",
            remote="10.0.1.2",
            path=1,
            live=2,
            state=RowState.SUSPECT,
            round_trip_us=3,
            sent_bytes=4,
            received_bytes=5,
            sent_again=6,
            duplicates=7,
            downs=8,
            ups=9,
            corrupt=10,
            down_since_us=11,
        )
        data = encode_page(NetPage(pid=77, rank=None, updated_us=99, rows=(row,)), sequence=6)
        assert len(data) == 64 + 240
        assert data[:8] == b"TRNETST1"
        assert [int.from_bytes(data[at : at + 8], "little") for at in (8, 16)] == [6, 99]
        numbers = [int.from_bytes(data[at : at + 4], "little", signed=True) for at in (24, 28, 32, 36)]
        assert numbers == [77, -1, 1, 240]
        assert data[64:69] == b"eth1\0"
        assert data[64 + 32 : 64 + 41] == b"10.0.1.1\0"
        assert data[64 + 80 : 64 + 89] == b"10.0.1.2\0"
        assert [int.from_bytes(data[64 + at : 64 + at + 4], "little") for at in range(128, 144, 4)] == [1, 2, 2, 3]
        assert [int.from_bytes(data[64 + at : 64 + at + 8], "little") for at in range(144, 208, 8)] == [*range(4, 12)]

    @pytest.mark.parametrize("sequence", [0, 1, 7])
    def test_one_that_is_being_written_is_not_read(self, sequence: int) -> None:
        assert decode_page(encode_page(NetPage(pid=1, rank=0, updated_us=1, rows=()), sequence)) is None

    def test_one_that_is_being_made_is_not_read(self) -> None:
        assert decode_page(b"") is None
        assert decode_page(bytes(MAX_PAGE)) is None

    @pytest.mark.parametrize(
        ("at", "data"),
        [
            (0, b"TRNETST2"), (32, b"\x40"), (36, b"\xef"), (24, b"\xff\xff\xff\xff"), (28, b"\xfe\xff\xff\xff"),
            (64, b"\xff"), (64, b"a\nb\0"), (64 + 128, b"\x40"), (64 + 136, b"\x03"), (32, b"\x02"),
            (64 + 151, b"\x80"), (64 + 207, b"\x80"),
        ],
        ids=str,
    )  # fmt: skip
    def test_what_does_not_fit_is_refused(self, at: int, data: bytes) -> None:
        row = Row(
            interface="a",
            local="b",
            remote="c",
            path=0,
            live=1,
            state=RowState.UP,
            round_trip_us=0,
            sent_bytes=0,
            received_bytes=0,
            sent_again=0,
            duplicates=0,
            downs=0,
            ups=0,
            corrupt=0,
            down_since_us=0,
        )
        page = bytearray(encode_page(NetPage(pid=1, rank=0, updated_us=1, rows=(row,))))
        page[at : at + len(data)] = data
        with pytest.raises(WireError):
            decode_page(bytes(page))

    @given(st.binary(max_size=400))
    def test_any_bytes_are_refused_or_none(self, data: bytes) -> None:
        try:
            assert decode_page(data) is None
        except WireError:
            pass


class TestFiles:
    def test_a_page_is_read_from_its_file(self, tmp_path: Path) -> None:
        page = NetPage(pid=5, rank=2, updated_us=3, rows=())
        (tmp_path / "net-5").write_bytes(encode_page(page).ljust(MAX_PAGE, b"\0"))
        assert read_page(tmp_path / "net-5") == page
        assert read_page(tmp_path / "net-6") is None

    def test_one_whose_writer_died_while_writing_is_not_waited_for(self, tmp_path: Path) -> None:
        (tmp_path / "net-5").write_bytes(encode_page(NetPage(pid=5, rank=2, updated_us=3, rows=()), sequence=5))
        assert read_page(tmp_path / "net-5") is None

    def test_what_is_no_file_of_ours_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "net-1").symlink_to("/dev/zero")
        os.mkfifo(tmp_path / "net-2")
        (tmp_path / "net-3").mkdir()
        (tmp_path / "net-4").write_bytes(bytes(MAX_PAGE + 1))
        for pid, path in pages_in(tmp_path):
            with pytest.raises(WireError, match=f"net-{pid}"):
                read_page(path)

    def test_only_what_is_named_like_a_page_is_one(self, tmp_path: Path) -> None:
        for name in ("net-12", "net-", "net-x", "net-1.draft", "other", "net-²", "net-99999999999"):
            (tmp_path / name).touch()
        assert [pid for pid, _ in pages_in(tmp_path)] == [12]
        with pytest.raises(OSError, match="nowhere"):
            list(pages_in(tmp_path / "nowhere"))
