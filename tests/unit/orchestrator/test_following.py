"""What whoever follows a run from elsewhere is told: each line once, of ranks alone, and where the head is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from aiohttp import ClientSession

from tests.support.api import Port, play
from tests.support.brain import RecordingLink, train, until
from tests.support.service import Deaf
from torchrelay.api.shown import Head, Lines, Place
from torchrelay.orchestrator.http import following
from torchrelay.orchestrator.store.output import CHUNK, SKIPPED, Reader
from torchrelay.protocol.messages.ids import NodeId
from torchrelay.protocol.succession.succession import CopyId, Succession
from torchrelay.protocol.succession.succession import Place as CopyPlace

MOST = 1 << 20


def add(folder: Path, name: str, text: str) -> None:
    with (folder / name).open("a") as file:
        file.write(text)


def told(some: list[Lines]) -> list[tuple[int, str]]:
    return [(each.rank, line) for each in some for line in each.lines]


def places(some: list[Lines]) -> list[Place]:
    return [Place(each.rank, each.file, each.end) for each in some]


class TestReader:
    def test_each_line_comes_once_and_when_it_is_whole(self, tmp_path: Path) -> None:
        reader = Reader(tmp_path)
        assert reader.read(MOST) == []
        add(tmp_path, "rank-10.log", "ten\n")
        add(tmp_path, "rank-2.log", "one\ntw")
        assert told(reader.read(MOST)) == [(2, "one"), (10, "ten")]
        add(tmp_path, "rank-2.log", "o\n")
        assert told(reader.read(MOST)) == [(2, "two")]
        assert reader.read(MOST) == []

    def test_another_reader_goes_on_at_the_place_of_the_one_before(self, tmp_path: Path) -> None:
        add(tmp_path, "rank-0.log", "one\ntwo\n")
        found = Reader(tmp_path).read(MOST)
        add(tmp_path, "rank-0.log", "three\n")
        assert told(Reader(tmp_path, places(found)).read(MOST)) == [(0, "three")]

    def test_what_is_in_a_renamed_file_comes_first(self, tmp_path: Path) -> None:
        add(tmp_path, "rank-0.log", "one\n")
        reader = Reader(tmp_path)
        reader.read(MOST)
        add(tmp_path, "rank-0.log", "two\nno end")
        (tmp_path / "rank-0.log").rename(tmp_path / "rank-0.log.1")
        add(tmp_path, "rank-0.log", "three\n")
        assert [told(reader.read(MOST)) for _ in range(3)] == [[(0, "two"), (0, "no end")], [(0, "three")], []]
        assert told(Reader(tmp_path).read(MOST)) == [(0, "one"), (0, "two"), (0, "no end")], "one look, one file"

    def test_of_a_log_that_was_renamed_twice_it_is_said_that_lines_are_missing(self, tmp_path: Path) -> None:
        add(tmp_path, "rank-0.log", "one\n")
        reader = Reader(tmp_path)
        reader.read(MOST)
        (tmp_path / "rank-0.log").rename(tmp_path / "kept")  # so that no other file gets its number
        add(tmp_path, "rank-0.log", "five\n")
        assert told(reader.read(MOST)) == [(0, SKIPPED), (0, "five")]

    def test_a_log_that_was_emptied_is_read_from_its_beginning(self, tmp_path: Path) -> None:
        add(tmp_path, "rank-0.log", "one two three\n")
        reader = Reader(tmp_path)
        reader.read(MOST)
        (tmp_path / "rank-0.log").write_text("four\n")
        assert told(reader.read(MOST)) == [(0, "four")]

    def test_no_other_file_is_read_and_no_link_is_followed(self, tmp_path: Path) -> None:
        logs = tmp_path / "logs"
        logs.mkdir()
        add(tmp_path, "token", "secret\n")
        for name in ("orchestrator.log", "rank-x.log", "rank-.log", "m1.0.1.log", "rank-1.log.2", "rank-1.log\n"):
            add(logs, name, "no\n")
        (logs / "rank-0.log").symlink_to(tmp_path / "token")
        (logs / "rank-7.log").mkdir()
        assert Reader(logs).read(MOST, last=True) == []
        assert Reader(tmp_path / "none").read(MOST) == []

    def test_a_rank_that_prints_much_keeps_no_other_one_waiting(self, tmp_path: Path) -> None:
        add(tmp_path, "rank-0.log", "x" * 99 + "\n")
        for rank in range(3):
            add(tmp_path, f"rank-{rank}.log", ("y" * 99 + "\n") * (3 * CHUNK // 100))
        reader = Reader(tmp_path)
        assert [[each.rank for each in reader.read(CHUNK // 2)] for _ in range(4)] == [[0], [1], [2], [0]]
        while reader.read(MOST):
            pass
        assert reader.left() == 0

    def test_a_line_without_end_comes_in_pieces_or_at_last(self, tmp_path: Path) -> None:
        add(tmp_path, "rank-0.log", "x" * (CHUNK + 10))
        reader = Reader(tmp_path)
        assert [len(line) for _, line in told(reader.read(MOST))] == [CHUNK]
        assert reader.read(MOST) == []
        assert reader.left() == 10
        assert told(reader.read(MOST, last=True)) == [(0, "x" * 10)]

    def test_nothing_comes_that_a_terminal_would_obey(self, tmp_path: Path) -> None:
        (tmp_path / "rank-0.log").write_bytes(b"\x1b[2Jred\x07\ta\xc2\x9bb\n10%\r20%\r\n")
        assert told(Reader(tmp_path).read(MOST)) == [(0, "?[2Jred?\ta?b"), (0, "20%")]


async def data_of(port: Port, count: int, body: list[Place] | None = None) -> list[Lines]:
    """So many events of the stream."""
    found: list[Lines] = []
    data = None if body is None else msgspec.json.encode(body)
    async with port.session.get(port.url + "/v1/lines", data=data) as answer:
        assert answer.status == 200, await answer.text()
        assert answer.headers["X-Torchrelay-Logs"]
        async for line in answer.content:
            if line.startswith(b"data: "):
                found.append(msgspec.json.decode(line[6:], type=Lines))
                if len(found) == count:
                    break
    return found


class TestLines:
    @pytest.fixture
    def logs(self, tmp_path: Path) -> Path:
        folder = tmp_path / "run" / "logs"
        folder.mkdir(parents=True)
        return folder

    def test_lines_come_as_they_are_written_and_a_reader_goes_on_where_it_was(self, tmp_path: Path, logs: Path) -> None:
        async def story(port: Port) -> None:
            add(logs, "rank-0.log", "one\n")
            reading = asyncio.create_task(data_of(port, 2))
            await asyncio.sleep(0.3)
            add(logs, "rank-1.log", "two\n")
            found = await reading
            assert told(found) == [(0, "one"), (1, "two")]
            add(logs, "rank-0.log", "three\n")
            assert told(await data_of(port, 1, places(found))) == [(0, "three")]

        play(tmp_path, story, tmp_path / "run")

    @pytest.mark.parametrize("body", [b"{}", b'[["../token", 1, 2]]', b'[[0, 1, "x"]]', b"nonsense"])
    def test_nonsense_is_refused_in_words(self, tmp_path: Path, logs: Path, body: bytes) -> None:
        async def story(port: Port) -> None:
            async with port.session.get(port.url + "/v1/lines", data=body) as answer:
                assert answer.status == 400
                assert "list of places" in (await answer.json())["error"]

        assert logs.exists()
        play(tmp_path, story, tmp_path / "run")

    def test_without_the_token_there_are_none(self, tmp_path: Path, logs: Path) -> None:
        async def story(port: Port) -> None:
            for path in ("/v1/lines", "/v1/head"):
                async with ClientSession() as stranger, stranger.get(port.url + path) as answer:
                    assert answer.status == 401

        assert logs.exists()
        play(tmp_path, story, tmp_path / "run")

    def test_there_are_only_so_many_readers(self, tmp_path: Path, logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(following, "READERS", 1)

        async def story(port: Port) -> None:
            add(logs, "rank-0.log", "one\n")
            async with port.session.get(port.url + "/v1/lines") as answer:
                assert (await answer.content.readline()).startswith(b"data: ")
                assert "readers follow the lines already" in (await port.get("/v1/lines", 503))["error"]
            await asyncio.sleep(0.5)
            add(logs, "rank-0.log", "two\n")
            await asyncio.sleep(0.5)  # it is seen that nobody reads any more
            assert len(await data_of(port, 1)) == 1

        play(tmp_path, story, tmp_path / "run")

    def test_a_reader_that_does_not_read_is_cut_off_and_comes_back_at_its_place(
        self, tmp_path: Path, logs: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(following, "SLOW_S", 0.3)
        monkeypatch.setattr(following, "PAUSE_S", 0.0)
        whole = [f"{number:>80}" for number in range(200_000)]

        async def story(port: Port) -> None:
            add(logs, "rank-0.log", "".join(f"{line}\n" for line in whole))
            app_reading = port.app[following.READING]
            found: list[Lines] = []
            async with port.session.get(port.url + "/v1/lines") as answer:
                while not app_reading:
                    await asyncio.sleep(0.01)
                while app_reading:  # nothing is read here until it is given up
                    await asyncio.sleep(0.05)
                async for line in cut_off(answer.content):
                    if line.startswith(b"data: ") and line.endswith(b"\n"):
                        found.append(msgspec.json.decode(line[6:], type=Lines))
            lines = [line for each in found for line in each.lines]
            assert len(lines) < len(whole)
            while len(lines) < len(whole):
                more = await data_of(port, 1, places(found[-1:]))
                found += more
                lines += more[0].lines
            assert lines == whole

        play(tmp_path, story, tmp_path / "run")

    def test_at_the_end_the_last_lines_come_and_that_it_is_over(self, tmp_path: Path, logs: Path) -> None:
        async def story(port: Port) -> None:
            async with port.session.get(port.url + "/v1/lines") as answer:
                add(logs, "rank-0.log", "last\nwithout end")
                port.service.begin_shutdown("the run is over")
                told = [line async for line in answer.content if line.strip()]
            *lines, event, left = told
            assert [text for line in lines for text in json.loads(line[6:])[3]] == ["last", "without end"]
            assert (event, left) == (b"event: over\n", b"data: 0\n")

        play(tmp_path, story, tmp_path / "run")


async def cut_off(content: object) -> AsyncIterator[bytes]:
    """The lines of a stream up to where its connection was cut."""
    from aiohttp import ClientError, StreamReader

    assert isinstance(content, StreamReader)
    try:
        async for line in content:
            yield line
    except (ClientError, ConnectionError):
        return


class TestHead:
    def test_the_one_that_acts_says_so(self, tmp_path: Path) -> None:
        async def story(port: Port) -> None:
            await train(port.service, RecordingLink())
            told = await port.get("/v1/head")
            assert (told["acts"], told["lease"]) == (True, port.service.journal.lease)
            assert told["run_dir"] == str(tmp_path)

        play(tmp_path, story, tmp_path)

    def test_one_that_does_not_act_says_who_does_and_who_may(self) -> None:
        known = Succession(
            lease=3,
            version=1,
            head=CopyPlace(NodeId("m2"), CopyId("m2.x"), "https://10.0.0.2:1"),
            heirs=(CopyPlace(NodeId("m3"), CopyId("m3.y"), "https://10.0.0.3:2"),),
        )
        answer = following.not_the_head(known)
        assert answer.status == 503
        told = json.loads(answer.text or "")
        assert "on m2's machine, at https://10.0.0.2:1" in told["error"]
        head = msgspec.convert(told["head"], Head)
        assert (head.acts, head.node, head.url, head.lease) == (False, "m2", "https://10.0.0.2:1", 3)
        assert [(heir.node, heir.url) for heir in head.heirs] == [("m3", "https://10.0.0.3:2")]
        assert "m2.x" not in (answer.text or ""), "names of copies are nobody's business"


def test_what_a_loss_of_the_head_could_undo_is_not_told(tmp_path: Path) -> None:
    """Whoever follows hears the same from the next one, under the same numbers."""

    async def story(port: Port) -> None:
        await train(port.service, RecordingLink())
        deaf = Deaf()
        port.service.heirs = deaf  # type: ignore[assignment]
        async with port.session.get(port.url + "/v1/events") as answer:
            reading = asyncio.create_task(answer.content.readline())
            await until("it is to be told", lambda: deaf.waiting)
            assert not (await asyncio.wait((reading,), timeout=0.3))[0]
            deaf.waiting.pop()()
            assert (await reading).startswith(b"id: 1")
        port.service.heirs = None

    play(tmp_path, story)
