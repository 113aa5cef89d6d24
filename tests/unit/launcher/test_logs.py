"""Following the ranks' logs."""

from __future__ import annotations

import asyncio
from pathlib import Path

from torchrelay.wire.files.tails import LogTail, last_lines


def add(folder: Path, rank: int, text: bytes) -> None:
    with (folder / f"rank-{rank}.log").open("ab") as file:
        file.write(text)


def test_lines_come_whole_and_with_their_rank(tmp_path: Path) -> None:
    tail = LogTail(tmp_path)
    assert tail.read() == []
    add(tmp_path, 10, b"ten\n")
    add(tmp_path, 2, b"one\ntw")
    assert tail.read() == [(2, "one"), (10, "ten")]
    add(tmp_path, 2, b"o\n\n")
    assert tail.read() == [(2, "two"), (2, "")]
    assert tail.read() == []


def test_a_character_may_be_cut_in_two(tmp_path: Path) -> None:
    tail = LogTail(tmp_path)
    add(tmp_path, 0, "caf\u00e9".encode()[:-1])
    assert tail.read() == []
    add(tmp_path, 0, "caf\u00e9\n".encode()[4:])
    assert tail.read() == [(0, "caf\u00e9")]
    add(tmp_path, 0, b"\xff\n")
    assert tail.read() == [(0, "\ufffd")]


def test_of_a_progress_bar_the_last_state_is_shown(tmp_path: Path) -> None:
    tail = LogTail(tmp_path)
    add(tmp_path, 0, b"10%\r20%\r100%\nwindows\r\n")
    assert tail.read() == [(0, "100%"), (0, "windows")]


def test_other_files_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "agent-node-0.log").write_text("no\n")
    (tmp_path / "rank-x.log").write_text("no\n")
    assert LogTail(tmp_path).read() == []
    assert LogTail(tmp_path / "not there").read() == []


def test_what_was_there_before_can_be_left_out(tmp_path: Path) -> None:
    add(tmp_path, 0, b"old\n")
    tail = LogTail(tmp_path, from_start=False)
    add(tmp_path, 0, b"new\n")
    assert tail.read() == [(0, "new")]


def test_an_emptied_file_starts_anew(tmp_path: Path) -> None:
    tail = LogTail(tmp_path)
    add(tmp_path, 0, b"a long line\n")
    tail.read()
    (tmp_path / "rank-0.log").write_bytes(b"new\n")
    assert tail.read() == [(0, "new")]


def test_a_line_without_an_end_is_cut_at_last(tmp_path: Path) -> None:
    tail = LogTail(tmp_path)
    add(tmp_path, 0, b"x" * ((1 << 20) + 10))
    lines = tail.read() + tail.read()
    assert [len(line) for _, line in lines] == [(1 << 20) + 10]


def test_followed_lines_come_as_they_are_written_and_the_rest_at_the_stop(tmp_path: Path) -> None:
    async def story() -> None:
        tail = LogTail(tmp_path)
        lines = tail.follow(every_s=0.01)
        add(tmp_path, 0, b"first\n")
        assert await anext(lines) == (0, "first")
        add(tmp_path, 1, b"second\n")
        assert await anext(lines) == (1, "second")
        add(tmp_path, 0, b"third\nunfinished")
        tail.stop()
        assert [line async for line in lines] == [(0, "third"), (0, "unfinished")]

    asyncio.run(story())


def test_the_last_lines_of_a_log(tmp_path: Path) -> None:
    path = tmp_path / "w1.log"
    assert last_lines(path) == []
    path.write_text("".join(f"{number}\n" for number in range(50_000)))
    assert last_lines(path, 2) == ["49998", "49999"]
