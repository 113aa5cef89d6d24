"""Operating: verbs that look at places and moves, and those that change something, against a living orchestrator."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from aiohttp import ClientSession

from tests.support.brain import JOB, serving, until
from tests.support.operating import Desk, play
from torchrelay.api.endpoint import Endpoint, write_endpoint
from torchrelay.orchestrator.http.changes import look_for_freezes
from torchrelay.protocol.messages.events import (
    Effect,
    FreezeSet,
    JobCancelled,
    MoveAsked,
    TaintSet,
    WorkerExited,
)


class TestLooking:
    def test_nodes_tell_what_each_slot_holds(self, tmp_path: Path) -> None:
        async def story(desk: Desk) -> None:
            told = (await desk.say("nodes")).out
            assert "0:rank0 1:rank1 2:spare" in told
            assert "0:rank2 1:rank3 2:spare" in told
            await desk.say("taint", "node-1/0", "gpu/ecc=63", "--reason", "row remap", "--ttl", "10m")
            found = await desk.ask("nodes")
            (taint,) = found["nodes"][1]["taints"]
            assert (taint["place"], taint["key"], taint["effect"]) == ("node-1/0", "gpu/ecc", "NoExecute")
            assert 590 < taint["left_s"] <= 600
            assert [slot["holds"] for slot in found["nodes"][0]["slots"]] == ["rank", "rank", "target"]
            (failure,) = found["nodes"][1]["failures"]
            assert failure["slot"] == 0
            told = (await desk.say("nodes")).out
            assert "row remap" in told
            assert "min left" in told
            assert "node-1/0 failed once within 30 days" in told

        play(tmp_path, story)

    def test_spares_tell_whose_target_they_are_and_what_refuses_them(self, tmp_path: Path) -> None:
        async def story(desk: Desk) -> None:
            await desk.say("taint", "node-1/2", "noisy:noschedule", "--reason", "fan")
            await desk.say("migrate", "2")
            rows = {row["worker"]: row for row in (await desk.ask("spares"))["spares"]}
            assert (rows["node-0.2.4"]["target_of"], rows["node-0.2.4"]["move"]) == (2, "M-1")
            assert "target of rank 2 in M-1, being prepared" in (await desk.say("spares")).out

        play(tmp_path, story)

    def test_moves_and_status_tell_the_open_move_and_why_it_waits(self, tmp_path: Path) -> None:
        async def story(desk: Desk) -> None:
            assert "no move so far" in (await desk.say("moves")).out
            await desk.say("drain", "node-1")
            (move,) = await desk.ask("moves")
            assert (move["name"], move["state"], move["ranks"]) == ("M-1", "waiting", [2, 3])
            told = (await desk.say("status")).out
            assert "M-1 (planned) waiting: waits: 2 workers needed, there is room for 1" in told
            assert "node-1 torchrelay/drain:NoExecute" in told
            assert (await desk.ask("status"))["move"]["name"] == "M-1"
            assert "M-1" in (await desk.say("moves")).out

        play(tmp_path, story)

    @pytest.mark.parametrize("about", [("rank", "3"), ("rank-3",), ("node-1",), ("node-1/2",), ("node-0.2.4",)])
    def test_explain_takes_ranks_nodes_slots_and_workers(self, tmp_path: Path, about: tuple[str, ...]) -> None:
        async def story(desk: Desk) -> None:
            said = await desk.say("explain", *about)
            assert said.code == 0
            assert len(said.out.splitlines()) > 1
            assert (await desk.ask("explain", *about))["lines"]

        play(tmp_path, story)

    def test_what_cannot_be_explained_is_told_with_what_can(self, tmp_path: Path) -> None:
        async def story(desk: Desk) -> None:
            for about, told in (("M-7", "there are: none"), ("3", "explain rank 3"), ("x", "a slot (node-1/0)")):
                said = await desk.say("explain", about)
                assert (said.code, told in said.err) == (2, True), said

        play(tmp_path, story)


class TestChanging:
    def test_migrate_prints_the_plan_does_it_and_says_the_name(self, tmp_path: Path) -> None:
        async def story(desk: Desk) -> None:
            said = await desk.say("migrate", "2", "--to", "node-0", "--reason", "a test")
            assert said.code == 0
            assert "rank 2 on node-1/0 (node-1.0.2) moves to node-0/2 (warm spare node-0.2.4)" in said.out
            assert "done as M-1; `torchrelay explain M-1` tells how it goes on" in said.out
            (asked,) = [event for event in desk.journalled() if isinstance(event, MoveAsked)]
            assert asked.reason == "a test"
            assert "@" in asked.source, "who asked stands in the event"
            assert asked.source in (await desk.say("explain", "M-1")).out

        play(tmp_path, story)

    def test_a_dry_run_prints_the_plan_and_changes_nothing(self, tmp_path: Path) -> None:
        async def story(desk: Desk) -> None:
            before = desk.service.journal.last_seq
            for words in (["drain", "node-1"], ["taint", "node-1", "k"], ["migrate", "0"], ["freeze"]):
                said = await desk.say(*words, "--dry-run")
                assert (said.code, bool(said.out)) == (0, True)
            plan = await desk.ask("drain", "node-1", "--dry-run")
            assert (plan["applied"], plan["move"]) == (False, "M-1")
            assert desk.service.journal.last_seq == before
            assert not (desk.run_dir / "FREEZE").exists()

        play(tmp_path, story)

    def test_on_a_terminal_it_asks_and_no_means_no(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        class Terminal(io.StringIO):
            def isatty(self) -> bool:
                return True

        async def story(desk: Desk) -> None:
            monkeypatch.setattr(sys, "stdin", Terminal("no\n"))
            said = await desk.say("drain", "node-1")
            assert (said.code, "nothing was changed" in said.err, "go on?" in said.err) == (1, True, True)
            assert not desk.service.cluster.taints
            monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
            assert (await desk.say("drain", "node-1")).code == 0
            assert desk.service.cluster.taints
            monkeypatch.setattr(sys, "stdin", Terminal(""))
            assert (await desk.say("undrain", "node-1", "--yes")).code == 0
            assert not desk.service.cluster.taints

        play(tmp_path, story)

    def test_again_changes_nothing_and_says_so(self, tmp_path: Path) -> None:
        async def story(desk: Desk) -> None:
            for words, told in (
                (["taint", "node-0/1", "k=v"], "has the taint k already"),
                (["drain", "node-1"], "is drained already"),
                (["undrain", "node-1"], "is not drained"),
                (["cordon", "node-1"], "is cordoned already"),
                (["uncordon", "node-1"], "is neither cordoned nor drained"),
                (["untaint", "node-0/1", "k", "--healed"], "has no taint k"),
            ):
                assert (await desk.say(*words)).code == 0
                before = desk.service.journal.last_seq
                again = await desk.say(*words)
                assert (again.code, told in again.out) == (0, True), again
                assert not [e for e in desk.journalled()[before:] if type(e).__name__.startswith("Taint")]

        play(tmp_path, story)

    def test_what_runs_on_a_cordoned_node_stays_and_uncordon_ends_a_drain_too(self, tmp_path: Path) -> None:
        async def story(desk: Desk) -> None:
            said = await desk.say("cordon", "node-1", "--reason", "new disks next week", "--yes")
            assert said.code == 0
            assert "nothing new is put there; what runs there stays" in said.out
            ((key, taint),) = desk.service.cluster.taints.items()
            assert key == ("node-1", None, "torchrelay/cordon")
            assert (taint.effect, taint.planned) == (Effect.NO_SCHEDULE, False)
            assert not any(job.moving.moves for job in desk.service.cluster.jobs.values())
            assert (await desk.say("uncordon", "node-1", "--yes")).code == 0
            assert not desk.service.cluster.taints
            await desk.say("drain", "node-1", "--yes")
            assert (await desk.say("uncordon", "node-1", "--yes")).code == 0
            assert not desk.service.cluster.taints

        play(tmp_path, story)

    @pytest.mark.parametrize(
        ("words", "told"),
        [
            ("migrate 9", "no rank 9: job has ranks 0 to 3"),
            ("migrate 2 --to node-1", "rank 2 is on node-1 already"),
            ("migrate", "which ranks"),
            ("migrate 1 --job jub", "known: job"),
            ("drain node-9", "there are: node-0, node-1"),
            ("drain node-1/7", "no slot 7 on node-1"),
            ("taint node-1/x k", "is no place"),
            ("taint node-1 k:Never", "effects: NoExecute, NoSchedule"),
            ("taint node-1 k --ttl soon", "is no time"),
            ("untaint node-9 k", "there are: node-0, node-1"),
        ],
    )
    def test_what_cannot_be_asked_for_ends_with_2(self, tmp_path: Path, words: str, told: str) -> None:
        async def story(desk: Desk) -> None:
            said = await desk.say(*words.split())
            assert (said.code, told in said.err) == (2, True), said

        play(tmp_path, story)

    def test_a_finished_job_takes_no_orders(self, tmp_path: Path) -> None:
        async def story(desk: Desk) -> None:
            await desk.service.put(JobCancelled(job=JOB, reason="enough"))
            desk.service.kept = True
            for words in ("migrate 2", "drain node-1", "undrain node-1", "restart-services --force"):
                said = await desk.say(*words.split())
                assert (said.code, "enough" in said.err) == (2, True), said

        play(tmp_path, story)

    def test_a_restart_is_refused_where_nobody_would_start_it_again(self, tmp_path: Path) -> None:
        async def story(desk: Desk) -> None:
            said = await desk.say("restart-services")
            assert (said.code, "was not started by `torchrelay run`" in said.err) == (2, True)
            desk.service.kept = True
            await desk.say("migrate", "2")
            said = await desk.say("restart-services")
            assert (said.code, "M-1 of job is preparing" in said.err) == (2, True)
            assert "one after the other" in (await desk.say("restart-services", "--dry-run", "--force")).out

        play(tmp_path, story)

    def test_without_an_orchestrator_nothing_is_changed(self, tmp_path: Path) -> None:
        async def story(desk: Desk) -> None:
            write_endpoint(desk.run_dir, Endpoint(url="http://127.0.0.1:9", pid=1))
            said = await desk.say("drain", "node-1")
            assert (said.code, "nothing was changed" in said.err) == (1, True)

        play(tmp_path, story)

    def test_a_run_that_is_over_takes_no_orders(self, tmp_path: Path) -> None:
        async def story(desk: Desk) -> None:
            await desk.service.put(JobCancelled(job=JOB, reason="enough"))
            for worker in list(desk.service.cluster.workers.values()):
                await desk.service.put(WorkerExited(worker=worker.worker, node=worker.node, code=0))
            assert desk.service.cluster.jobs[JOB].phase == "ended"
            write_endpoint(desk.run_dir, Endpoint(url="http://127.0.0.1:9", pid=1))
            for words in ("drain node-1", "migrate 2", "freeze", "restart-services"):
                said = await desk.say(*words.split())
                assert (said.code, "the run ended at" in said.err) == (2, True), said
            assert "is ended" in (await desk.say("explain", "node-1")).out

        play(tmp_path, story)


class TestAudit:
    def test_every_changing_call_is_listed_with_who_and_what(self, tmp_path: Path) -> None:
        async def story(desk: Desk) -> None:
            await desk.say("drain", "node-1", "--reason", "new disks")
            await desk.say("drain", "node-1")
            await desk.say("undrain", "node-1")
            headers = {"Authorization": f"Bearer {desk.token}", "X-Torchrelay-Who": "eve@office"}
            async with ClientSession(headers=headers) as session:
                url = f"{desk.url}/v1/jobs/{JOB}/cancel"
                async with session.post(url, data=b'{"reason": "enough"}') as answer:
                    assert answer.status == 202
            calls = await desk.ask("audit")
            assert [(one["call"], one["what"]) for one in calls] == [
                ("drain", "node-1: new disks"),
                ("undrain", "node-1"),
                ("cancel", "job: enough"),
            ]
            assert calls[-1]["who"] == "eve@office"
            assert [type(desk.journalled()[one["seq"] - 1]).__name__ for one in calls] == [
                "TaintSet",
                "TaintCleared",
                "JobCancelled",
            ]
            table = (await desk.say("audit")).out
            # The same from the journal alone.
            write_endpoint(desk.run_dir, Endpoint(url="http://127.0.0.1:9", pid=1))
            away = await desk.say("audit")
            assert away.out == table
            assert "the run" in away.err or "away" in away.err

        play(tmp_path, story)

    def test_events_of_operators_say_who(self, tmp_path: Path) -> None:
        async def story(desk: Desk) -> None:
            await desk.say("taint", "node-1", "k")
            (event,) = [event for event in desk.journalled() if isinstance(event, TaintSet)]
            assert event.source == (await desk.ask("audit"))[0]["who"]

        play(tmp_path, story)


class TestFreezing:
    def test_a_file_freezes_and_its_end_unfreezes(self, tmp_path: Path) -> None:
        async def story(desk: Desk) -> None:
            (desk.run_dir / "FREEZE").touch()
            await until("a freeze", lambda: desk.service.cluster.freezes)
            assert list(desk.service.cluster.freezes) == [f"file {desk.run_dir / 'FREEZE'}"]
            (desk.run_dir / "FREEZE").unlink()
            await until("its end", lambda: not desk.service.cluster.freezes)
            assert [call["who"] for call in await desk.ask("audit")][-1] == "whoever removed the file"

        play(tmp_path, story)

    def test_the_verbs_write_and_remove_it_and_wait_until_it_is_seen(self, tmp_path: Path) -> None:
        async def story(desk: Desk) -> None:
            assert (await desk.say("freeze", "--reason", "new switch")).code == 0
            (freeze,) = desk.service.cluster.freezes.values()
            assert freeze == "new switch"
            told = (await desk.say("status")).out
            assert f"by file {desk.run_dir / 'FREEZE'}: new switch" in told
            assert "frozen already" in (await desk.say("freeze")).out
            assert "frozen by" in (await desk.say("migrate", "2")).out
            assert (await desk.say("freeze", "--all")).code == 0
            assert (tmp_path / "FREEZE").exists()
            said = await desk.say("unfreeze")
            assert f"still frozen by file {tmp_path / 'FREEZE'}" in said.err
            assert (await desk.say("unfreeze", "--all")).code == 0
            assert not desk.service.cluster.freezes
            assert "not frozen" in (await desk.say("unfreeze")).out
            calls = [(one["call"], "@" in one["who"]) for one in await desk.ask("audit") if "freeze" in one["call"]]
            assert calls == [("freeze", True), ("freeze", True), ("unfreeze", True), ("unfreeze", True)]

        play(tmp_path, story)

    def test_it_works_without_an_orchestrator(self, tmp_path: Path) -> None:
        async def story(desk: Desk) -> None:
            write_endpoint(desk.run_dir, Endpoint(url="http://127.0.0.1:9", pid=1))
            said = await desk.say("freeze")
            assert said.code == 0
            assert "is away" in said.err
            assert (desk.run_dir / "FREEZE").exists()

        play(tmp_path, story)

    def test_whoever_starts_looks_before_anything_else(self, tmp_path: Path) -> None:
        async def story() -> None:
            (tmp_path / "FREEZE").write_text("while we look\x1b[2J\nann@desk\n")
            async with serving(tmp_path) as service:
                look_for_freezes(service, tmp_path)
                (event,) = [entry.event for entry in service.journal.entries()]
                assert event == FreezeSet(source=f"file {tmp_path / 'FREEZE'}", reason="while we look[2J")
                assert service.journal.calls()[0].who == "ann@desk"
                look_for_freezes(service, tmp_path)
                assert service.journal.last_seq == 1

        asyncio.run(story())


def test_status_imports_neither_torch_nor_a_web_server_nor_tables(tmp_path: Path) -> None:
    code = """
import contextlib, io, sys
from torchrelay.cli import main
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as out:
    main.main(["status", "-o", "json", "--run-dir", sys.argv[1]])
print(out.getvalue())
heavy = ("torch", "numpy", "aiohttp", "rich", "asyncio", "sqlite3", "importlib.metadata",
         "torchrelay.protocol.model.job")
print([name for name in heavy if name in sys.modules])
"""

    async def story(desk: Desk) -> None:
        def ask() -> str:
            words = [sys.executable, "-c", code, str(desk.run_dir)]
            return subprocess.run(words, check=True, capture_output=True, text=True, timeout=60).stdout

        *found, loaded = (await asyncio.to_thread(ask)).strip().splitlines()
        assert json.loads("\n".join(found))["phase"] == "running"
        assert loaded == "[]"

    play(tmp_path, story)
