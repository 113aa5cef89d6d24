"""A launcher whose orchestrator has given way follows the one that acts, says so, and does not wait for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.support.brain import until
from tests.support.heads import Stand, standing
from torchrelay.api.endpoint import Endpoint, read_endpoint, write_endpoint
from torchrelay.cli.launch.run import plan
from torchrelay.client.runs import NotPossible
from torchrelay.launcher import machines_run as module
from torchrelay.launcher.machines_run import MachinesRun
from torchrelay.launcher.voice import Voice

Said = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.02)
    monkeypatch.setattr("torchrelay.client.heads.LOOK_S", 0.02)


def played(folder: Path, count: int, story: Callable[..., Awaitable[None]]) -> None:
    """A launcher whose orchestrator has been superseded, and some that may act in its place."""

    async def all_of_it() -> None:
        run_dir, private = folder / "run", folder / "private"
        run_dir.mkdir()
        private.mkdir()
        words = [
            "--by-hand",
            "--host",
            "127.0.0.1",
            "--nnodes",
            "2",
            "--run-dir",
            str(run_dir),
            str(folder / "train.py"),
        ]
        run = MachinesRun(plan(words), Voice(quiet=False, world_size=2), private)
        run.make_trust()
        async with asyncio.timeout(30):
            stands: list[Stand] = []
            await with_all(run_dir, count, stands, lambda: story(run, *stands))

    (folder / "train.py").write_text("")
    asyncio.run(all_of_it())


async def with_all(passes: Path, count: int, stands: list[Stand], story: Callable[[], Awaitable[None]]) -> None:
    if not count:
        await story()
        return
    async with standing(passes) as stand:
        stands.append(stand)
        await with_all(passes, count - 1, stands, story)


def test_it_goes_to_the_one_that_acts_and_leaves_word_in_the_runs_folder(tmp_path: Path, capsys: Said) -> None:
    async def story(run: MachinesRun, first: Stand, second: Stand) -> None:
        write_endpoint(run.plan.run_dir, Endpoint(url=first.url, pid=0, journal="ours"))
        first.act(2, second.url, node="m2")
        second.point_to(first.url)
        minding = asyncio.create_task(run.mind_head())
        await until("it follows", lambda: run.heads.acts)
        first.point_to("https://127.0.0.1:1")
        second.act(3, node="m3")

        def told() -> bool:
            endpoint = read_endpoint(run.plan.run_dir)
            return endpoint is not None and (endpoint.url, endpoint.pid, endpoint.journal) == (second.url, 0, "ours")

        await until("word in the folder", told)
        assert run.now().url == second.url
        minding.cancel()
        await asyncio.gather(minding, return_exceptions=True)

    played(tmp_path, 2, story)
    said = capsys.readouterr().err
    assert "the orchestrator on m2 acts now, at https://" in said
    assert "the orchestrator on m3 acts now, at https://" in said


def test_it_waits_only_so_long_for_another_one(tmp_path: Path, capsys: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AWAY_S", 0.1)

    async def story(run: MachinesRun) -> None:
        write_endpoint(run.plan.run_dir, Endpoint(url="https://127.0.0.1:1", pid=0))
        with pytest.raises(NotPossible, match=r"no orchestrator has acted for 0.1 s") as told:
            await run.until_verdict(run.mind_head())
        assert told.value.code == 92

    played(tmp_path, 0, story)
    assert "no orchestrator acts at the moment (https://127.0.0.1:1: Connection refused)" in capsys.readouterr().err


def test_heirs_out_of_reach_are_said_and_waited_for_only_so_long(tmp_path: Path, capsys: Said) -> None:
    async def story(run: MachinesRun) -> None:
        run._mind_apart("m2", 10.0)
        run._mind_apart("", 20.0)
        assert capsys.readouterr().err == "", "an heir was replaced"
        run._mind_apart("m2 and m3", 30.0)
        run._mind_apart("m2 and m3", 40.0)
        run._mind_apart("m2 and m3", 50.0)
        said = capsys.readouterr().err
        assert said.count("m2 and m3 cannot be reached: the network is split, or they are lost") == 1
        run._mind_apart("", 60.0)
        assert "in reach again" in capsys.readouterr().err
        for now_s in (70.0, 80.0, 70.0 + module.AWAY_S):
            run._mind_apart("m2", now_s)
        assert not run.verdict.done()
        run._mind_apart("m2", 71.0 + module.AWAY_S)
        with pytest.raises(NotPossible, match=r"m2 could not be reached for 3600 s"):
            run.verdict.result()

    played(tmp_path, 0, story)


def test_one_that_waits_at_its_own_door_is_said_and_waited_for_only_so_long(
    tmp_path: Path, capsys: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HEIRS_S", 0.0)

    async def story(run: MachinesRun, ours: Stand) -> None:
        write_endpoint(run.plan.run_dir, Endpoint(url=ours.url, pid=1))
        ours.point_to(ours.url)
        await run._look_at_heirs()
        ours.act(2)
        await run._look_at_heirs()
        ours.point_to(ours.url)
        await run._look_at_heirs()
        assert capsys.readouterr().err == "", "it was started again, and acts"
        await run._look_at_heirs()
        await run._look_at_heirs()
        said = capsys.readouterr().err
        assert said.count("the orchestrator here waits for most of the nodes (no): the network is split, or") == 1
        ours.act(3)
        await run._look_at_heirs()
        assert "in reach again" in capsys.readouterr().err
        ours.point_to(ours.url)
        for _ in range(2):
            await run._look_at_heirs()
        assert not run.verdict.done()
        monkeypatch.setattr(module, "AWAY_S", 0.0)
        await run._look_at_heirs()
        with pytest.raises(
            NotPossible, match=r"for 0 s the orchestrator here waits for most of the nodes \(no\)"
        ) as told:
            run.verdict.result()
        assert told.value.code == 92

    played(tmp_path, 1, story)


def test_another_refusal_is_no_word_on_who_acts(tmp_path: Path, capsys: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEIRS_S", 0.0)

    async def story(run: MachinesRun, ours: Stand) -> None:
        write_endpoint(run.plan.run_dir, Endpoint(url=ours.url, pid=1))
        ours.status = 403
        for _ in range(3):
            await run._look_at_heirs()

    played(tmp_path, 1, story)
    assert capsys.readouterr().err == ""
