"""`torchrelay run` from start to end, with workers that train nothing: whatever ends, nothing is left running."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.support.brain import wait_for
from tests.support.cli_local_run import (
    TWO,
    LocalRun,
    run,  # noqa: F401  a fixture
)
from torchrelay.chaos.wishes import Deed, Outlook, Wish
from torchrelay.cli.diagnose import chaos
from torchrelay.launcher.sweep import PrivateFolder
from torchrelay.protocol.messages.ids import Rank

pytestmark = pytest.mark.timeout(120)


class TestEnds:
    def test_a_run_ends_with_the_scripts_code_and_says_so(self, run: LocalRun) -> None:
        run.start(*TWO, "5", "0.01")
        code, out, err = run.end()
        assert code == 0
        assert {f"[{rank}] step {step}" for rank in (0, 1) for step in range(1, 6)} <= set(out.splitlines())
        assert "train ended with 0 after 5 steps; no incident; ledger: torchrelay report" in err
        assert run.mark not in (run.run_dir / "job.json").read_text()  # of the environment nothing is kept
        assert run.ledger() == []

    def test_quiet_prints_the_last_line_only(self, run: LocalRun) -> None:
        run.start("--quiet", *TWO, "3", "0.01")
        code, out, err = run.end()
        assert (code, out) == (0, "")
        assert len(err.splitlines()) == 1

    def test_a_reader_that_leaves_does_not_end_training(self, run: LocalRun) -> None:
        process = run.start(*TWO, "20", "0.05")
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        process.stdout = None
        code, _, err = run.end()
        assert code == 0
        assert "ended with 0 after 20 steps" in err
        assert "Traceback" not in err

    def test_a_script_that_never_joins_is_told_how(self, run: LocalRun) -> None:
        run.start(*TWO, "3", "0.01", "never-join")
        code, _, err = run.end()
        assert code == 0
        assert "never called torchrelay.protect()" in err
        assert "run = torchrelay.protect(model=model, optimizer=optimizer)" in err

    def test_a_script_that_fails_everywhere_ends_with_its_code(self, run: LocalRun) -> None:
        run.start(*TWO, "3", "0.01", "exit=7")
        code, _, err = run.end()
        assert code == 7
        assert "ended with 7" in err

    def test_an_outcome_that_came_before_it_was_asked_for_is_read_from_the_journal(self, run: LocalRun) -> None:
        """What broke a run so that it ended at once is not left waiting for an orchestrator that has gone."""
        run.start(*TWO, "30", "0.05", "exit=7")
        run.until_step(1)
        words = ["kill", "--rank", "0", "--yes", "--run-dir", str(run.run_dir)]
        session = chaos.Session.of(chaos.parser().parse_args(words))
        wish, expects = Wish(deed=Deed.KILL, rank=Rank(0)), Outlook(text="an incident", incident=True)
        assert run.end()[0] == 7
        begun = chaos.Result(wish=wish, at=chaos.now(), steps=(), expects=expects.text)
        found = session.outcome(begun, expects, known=0)
        assert found.resolved is False
        assert found.outcome.startswith("the job ended with 7")

    def test_a_module_that_cannot_be_loaded_ends_with_94_and_the_reason(self, run: LocalRun) -> None:
        run.start(*TWO, "3", "0.01", FAKE_PRELOAD="no_such_module_to_preload")
        code, _, err = run.end()
        assert code == 94
        assert "no_such_module_to_preload" in err


class TestFaults:
    @pytest.mark.usefixtures("no_kernel_kills")
    def test_a_killed_worker_is_replaced_and_told_of(self, run: LocalRun) -> None:
        run.start(*TWO, "300", "0.02")
        run.until_step(3)
        run.until_spare()
        run.rank(1).kill()
        code, _, err = run.end()
        assert code == 0
        assert "I-1: rank 1: SIGKILL" in err
        assert "I-1 clean in" in err
        assert "1 incident, resolved clean" in err
        (line,) = run.ledger()
        assert (line["cause"], line["resolution"], line["steps_lost"]) == ("SIGKILL", "clean", 0)
        assert set(line["phases"]) >= {"detect", "interrupt", "agree", "acquire", "reconfigure", "restore", "resume"}

    def test_without_a_spare_it_waits_says_so_and_ends_with_90(self, run: LocalRun) -> None:
        run.start("--nproc-per-node", "2", "--no-refill", "--spare-wait", "0.5", "train.py", "500", "0.02")
        run.until_step(2)
        run.rank(0).kill()
        code, _, err = run.end()
        assert code == 90
        assert "no spare for rank 0: waiting for one" in err

    def test_a_killed_orchestrator_comes_back_and_training_does_not_notice(self, run: LocalRun) -> None:
        run.start(*TWO, "250", "0.02")
        run.until_step(3)
        run.until_spare()
        run.orchestrator().kill()
        wait_for("another orchestrator", lambda: run.status().get("phase") == "running")
        run.rank(1).kill()
        code, _, err = run.end()
        assert code == 0
        assert "1 incident, resolved clean" in err

    def test_an_orchestrator_that_is_killed_in_the_middle_of_a_recovery_finishes_it(self, run: LocalRun) -> None:
        run.start(*TWO, "250", "0.02")
        run.until_step(3)
        run.until_spare()
        orchestrator, victim = run.orchestrator(), run.rank(1)
        victim.kill()
        orchestrator.kill()
        code, _, err = run.end()
        assert code == 0
        assert "1 incident, resolved clean" in err

    def test_a_killed_agent_comes_back_and_adopts_its_workers(self, run: LocalRun) -> None:
        run.start("--nodes", "2", "--nproc-per-node", "1", "--spares", "2", "train.py", "250", "0.02")
        run.until_step(3)
        run.agent("node-1").kill()
        code, _, err = run.end()
        assert code == 0
        assert "no incident" in err

    def test_an_orchestrator_that_cannot_come_back_ends_nothing_and_is_tried_again(self, run: LocalRun) -> None:
        """Its journal is moved away, and put back."""
        run.start(*TWO, "5000", "0.02")
        run.until_step(2)
        ranks = [run.rank(0), run.rank(1)]
        away = run.folder / "away"
        away.mkdir()
        files = list(run.run_dir.glob("journal.db*"))
        for path in files:
            path.rename(away / path.name)
        run.orchestrator().kill()
        assert "journal.db is gone" in run.until_said("Training goes on without it")
        for path in files:
            (away / path.name).replace(path)
        wait_for("another orchestrator", lambda: run.status().get("phase") == "running", 60)
        run.until_said("the orchestrator is there again")
        assert all(rank.is_alive() for rank in ranks)
        run.stop_twice()
        assert run.end()[0] == 130


class TestStops:
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    def test_a_signal_stops_it_in_order(self, run: LocalRun, number: signal.Signals) -> None:
        process = run.start(*TWO, "5000", "0.02")
        run.until_step(2)
        process.send_signal(number)
        code, _, err = run.end()
        assert code == 130
        assert "stopping" in err
        assert "ended with 130: stopped by the operator" in err
        assert run.status() == {}

    def test_a_second_signal_kills_at_once_even_what_does_not_listen(self, run: LocalRun) -> None:
        run.start(*TWO, "5000", "0.02")
        run.until_step(2)
        for deaf in (run.rank(0), run.rank(1), run.agent(), run.orchestrator()):
            deaf.send_signal(signal.SIGSTOP)
        run.stop_twice()
        begin = time.monotonic()
        code, _, err = run.end()
        assert code == 130
        assert time.monotonic() - begin < 15
        assert "Traceback" not in err
        assert "Unknown child" not in err

    def test_what_a_dead_agent_left_is_found_and_ended(self, run: LocalRun) -> None:
        run.start(*TWO, "5000", "0.02")
        run.until_step(2)
        run.agent().kill()
        run.stop_twice()
        assert run.end()[0] == 130

    @pytest.mark.parametrize("after_s", [0.0, 0.2, 0.4, 0.7, 1.0])
    def test_it_can_be_stopped_while_it_starts(self, run: LocalRun, after_s: float) -> None:
        begun = run.folder / "begun"
        process = run.start(*TWO, "5000", "0.02", FAKE_BEGUN=str(begun))
        wait_for("the first line of ours: before it Python itself would be hit", begun.exists)
        time.sleep(after_s)  # the moment is the point of the test: anywhere within the start
        process.send_signal(signal.SIGINT)
        code, _, err = run.end()
        assert code in (130, -signal.SIGINT)
        assert "never retrieved" not in err

    def test_if_it_is_killed_itself_all_else_ends(self, run: LocalRun) -> None:
        process = run.start(*TWO, "5000", "0.02")
        run.until_step(2)
        process.kill()
        wait_for("the end of everything", lambda: not run.left(), 30)


class TestRefusals:
    def test_a_second_run_on_the_same_folder_is_refused_and_the_first_goes_on(self, run: LocalRun) -> None:
        first = run.start(*TWO, "5000", "0.02")
        run.until_step(2)
        run.start(*TWO, "5", "0.01")
        assert run.process is not None
        _, err = run.process.communicate(timeout=30)
        assert run.process.returncode == 94
        assert "holds a run that is under way" in err
        run.process = first
        run.until_step(run.status()["step"] + 2)
        run.stop_twice()
        assert run.end()[0] == 130

    def test_a_port_in_use_is_refused(self, run: LocalRun) -> None:
        import socket

        with socket.create_server(("127.0.0.1", 0)) as taken:
            run.start("--port", str(taken.getsockname()[1]), *TWO, "5", "0.01")
            code, _, err = run.end()
        assert code == 94
        assert "choose another --port" in err


class TestFolders:
    def test_what_a_killed_run_left_in_memory_is_cleared_by_the_next_and_a_living_ones_is_not(
        self, tmp_path: Path
    ) -> None:
        living = PrivateFolder(tmp_path)
        dead = tmp_path / "torchrelay-run-dead"
        dead.mkdir()
        (dead / "lock").touch()
        (dead / "page").write_text("x")
        another = PrivateFolder(tmp_path)
        assert not dead.exists()
        assert living.path.exists()
        for folder in (living, another):
            folder.remove()
        assert list(tmp_path.iterdir()) == []
