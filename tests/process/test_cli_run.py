"""`torchrelay run`: its command line, checked before anything starts; what it prints."""

from __future__ import annotations

import os
import re
import socket
import stat
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from torchrelay.api.shown import IncidentTally, JobStatus, OutcomeView, SpareTally
from torchrelay.cli import main as command
from torchrelay.cli.launch.run import IGNORED_FLAGS, IGNORED_VALUES, is_here, plan
from torchrelay.client.runs import NotPossible
from torchrelay.launcher.plan import Plan
from torchrelay.launcher.voice import Voice, remedy, summary, words_of
from torchrelay.orchestrator.views.story import Kind, Note
from torchrelay.protocol.messages.ids import Generation, JobId


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a script in it, where the command is given."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    return tmp_path


def refused(*words: str) -> str:
    with pytest.raises(NotPossible) as caught:
        plan(list(words))
    assert caught.value.code == 2
    assert not list(Path.cwd().glob("torchrelay-runs/*")), "nothing is made for a command that is refused"
    return str(caught.value)


class TestWords:
    def test_torchruns_flags_are_understood_in_both_spellings(self) -> None:
        for words in (["--nproc-per-node", "4", "--max-restarts=2"], ["--nproc_per_node=4", "--max_restarts", "2"]):
            found = plan([*words, "--job", f"job-{len(words)}", "train.py"])
            assert (found.spec.world_size, found.spec.nproc_per_node, found.spec.max_restarts) == (4, 4, 2)

    def test_our_own_flags_become_the_spec(self) -> None:
        words = ["--nodes", "2", "--nproc-per-node", "3", "--spares", "2", "--no-refill", "--spare-wait", "1.5"]
        spec = plan([*words, "--slot-faults", "0", "train.py"]).spec
        assert (spec.nodes, spec.world_size, spec.spares, spec.refill) == (2, 6, 2, False)
        assert (spec.spare_wait_ms, spec.slot_faults) == (1_500, 0)

    def test_how_ranks_may_be_moved_can_be_chosen(self) -> None:
        spec = plan(["train.py"]).spec
        assert (spec.moves_per_hour, spec.probation_ms, spec.return_home) == (60, 7 * 86_400_000, False)
        spec = plan(["--moves-per-hour", "-1", "--probation", "90m", "--return-home", "--job", "b", "train.py"]).spec
        assert (spec.moves_per_hour, spec.probation_ms, spec.return_home) == (-1, 5_400_000, True)

    def test_what_follows_the_script_belongs_to_it(self) -> None:
        found = plan(["train.py", "--spares", "9", "-m", "--", "--nproc-per-node=8"])
        assert found.launch.args == ("--spares", "9", "-m", "--", "--nproc-per-node=8")
        assert found.spec.spares == 0
        assert found.spec.world_size == 1

    def test_a_module_is_run_as_python_does(self) -> None:
        found = plan(["-m", "json.tool", "--indent", "2"])
        assert found.launch.argv == ("-m", "json.tool", "--indent", "2")

    def test_a_module_in_the_working_folder_is_found(self) -> None:
        assert plan(["-m", "train"]).launch.module

    @pytest.mark.parametrize("name", [*IGNORED_VALUES, *IGNORED_FLAGS])
    def test_torchrun_flags_without_meaning_here_are_named_and_ignored(self, name: str) -> None:
        value = [] if name in IGNORED_FLAGS else ["0" if name == "node-rank" else "x"]
        found = plan([f"--{name}", *value, "train.py", "an-argument"])
        assert found.launch.args == ("an-argument",)
        assert f"--{name}" in found.remarks[0]

    @pytest.mark.parametrize("flag", ["--node-rank=1", "--master-addr=192.0.2.7", "--rdzv-endpoint=192.0.2.7:29500"])
    def test_a_line_for_one_of_several_machines_is_refused(self, flag: str) -> None:
        assert f"{flag.replace('=', ' ')}" in refused("--nnodes", "2", flag, "train.py")

    @pytest.mark.parametrize(
        "where", ["localhost", "localhost:0", "127.0.0.1:29500", "", "[127.0.0.1]:0", socket.gethostname()]
    )
    def test_an_address_of_this_machine_is_none_of_another(self, where: str) -> None:
        assert is_here(where)
        told = plan(["--nnodes", "2", "--master-addr", where, "--job", "told", "train.py"]).remarks
        assert told == ("ignored, as it means nothing here: --master-addr; all 2 nodes are started on this machine",)
        assert plan(["--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", where, "train.py"]).spec.nodes == 2

    def test_nothing_is_remarked_without_reason(self) -> None:
        assert plan(["train.py"]).remarks == ()

    def test_settings_of_nccl_that_break_recoveries_are_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
        monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
        (told,) = plan(["train.py"]).remarks
        assert told.startswith("kept as you have set it: TORCH_NCCL_ASYNC_ERROR_HANDLING=3; torch may end")

    def test_cores_are_counted(self) -> None:
        assert plan(["--nproc-per-node", "cpu", "train.py"]).spec.world_size == os.cpu_count()


class TestRefusals:
    @pytest.mark.parametrize(
        ("words", "told"),
        [
            (["nowhere.py"], "script not found: nowhere.py"),
            (["."], "script not found"),
            (["-m", "no_such_module.x"], "module not found"),
            (["--nproc-per-node", "0", "train.py"], "at least 1"),
            (["--nproc-per-node", "gpu", "train.py"], "give a number"),
            (["--nnodes", "1:4", "train.py"], "give one number"),
            (["--nodes", "none", "train.py"], "--nodes none"),
            (["--spares", "-1", "train.py"], "cannot be negative"),
            (["--spare-wait", "-0.5", "train.py"], "cannot be negative"),
            (["--port", "99999", "train.py"], "from 0 (any) to 65535"),
            (["--spares", "many", "train.py"], "give a number of workers, or dedicated:K"),
            (["--no-python", "train.py"], "--no-python is not possible here"),
            (["--run-path", "train.py"], "give the script's path"),
            (["--job", "../../etc", "train.py"], "use letters"),
        ],
    )
    def test_what_cannot_be_run_is_refused_before_anything_starts(self, words: list[str], told: str) -> None:
        assert told in refused(*words)

    @pytest.mark.parametrize(
        "words", [[], ["--port", "many", "train.py"], ["--nproc", "4", "train.py"], ["--unknown", "train.py"]]
    )
    def test_what_is_no_command_at_all_ends_with_2(self, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            plan(words)
        assert caught.value.code == 2
        assert "torchrelay run: error:" in capsys.readouterr().err

    def test_a_folder_that_holds_a_run_is_refused(self, folder: Path) -> None:
        (folder / "run").mkdir()
        (folder / "run" / "journal.db").write_text("")
        with pytest.raises(NotPossible, match="holds a run already") as caught:
            plan(["--run-dir", "run", "train.py"])
        assert caught.value.code == 94

    def test_a_folder_that_cannot_be_made_is_refused(self, folder: Path) -> None:
        (folder / "file").write_text("")
        with pytest.raises(NotPossible, match="choose another --run-dir") as caught:
            plan(["--run-dir", "file/run", "train.py"])
        assert caught.value.code == 94

    @pytest.mark.parametrize("number", ["inf", "nan", "1e12"])
    def test_a_wait_has_an_end(self, number: str) -> None:
        assert refused("--spare-wait", number, "train.py").startswith("--spare-wait")

    def test_a_folder_with_a_path_that_no_journal_can_have_is_refused(self, folder: Path) -> None:
        assert "at most 400 are possible" in refused("--run-dir", str(folder / ("x" * 200) / ("y" * 200)), "train.py")

    def test_a_folder_that_is_gone_is_no_folder_to_begin_in(self, folder: Path) -> None:
        gone = folder / "gone"
        gone.mkdir()
        os.chdir(gone)
        gone.rmdir()
        with pytest.raises(NotPossible, match="the current folder is gone"):
            plan(["--run-dir", str(folder / "run"), str(folder / "train.py")])

    @pytest.mark.parametrize("closed", [0, 1, 2])
    def test_closed_streams_lead_nowhere(self, closed: int) -> None:
        words = [sys.executable, "-m", "torchrelay", "--version"]
        assert subprocess.run(words, preexec_fn=lambda: os.close(closed), timeout=60, check=False).returncode == 0

    def test_the_command_says_it_in_one_line(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            command.main(["run", "nowhere.py"])
        assert caught.value.code == 2
        assert capsys.readouterr().err.startswith("torchrelay: script not found: nowhere.py")


class TestFolder:
    def test_a_run_has_a_name_and_a_folder_of_its_own(self) -> None:
        found = plan(["train.py"])
        assert re.fullmatch(r"train-\d{8}-\d{6}", found.spec.job)
        assert found.run_dir == Path("torchrelay-runs") / found.spec.job
        assert stat.S_IMODE(found.run_dir.stat().st_mode) == 0o700

    def test_names_of_scripts_become_names_of_jobs(self, folder: Path) -> None:
        (folder / "my train+1.py").write_text("")
        assert plan(["--run-dir", "r", "my train+1.py"]).spec.job == "my-train-1"

    def test_the_ranks_output_can_go_elsewhere(self, folder: Path) -> None:
        found = plan(["--log-dir", "out/logs", "train.py"])
        (found.run_dir / "logs" / "rank-0.log").write_text("hello")
        assert (folder / "out" / "logs" / "rank-0.log").read_text() == "hello"

    def test_the_scripts_environment_is_the_operators(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MY_SETTING", "7")
        found: Plan = plan(["train.py"])
        assert found.launch.env["MY_SETTING"] == "7"
        assert found.launch.cwd == os.getcwd()


class TestVoice:
    def test_lines_have_their_ranks_prefix_without_colour_in_a_file(self, capsys: pytest.CaptureFixture[str]) -> None:
        voice = Voice(quiet=False, world_size=12)
        voice.line(3, "loss 1.0")
        voice.line(11, "loss 2.0")
        assert capsys.readouterr().out == "[ 3] loss 1.0\n[11] loss 2.0\n"

    def test_quiet_leaves_what_must_be_said(self, capsys: pytest.CaptureFixture[str]) -> None:
        voice = Voice(quiet=True, world_size=2)
        voice.line(0, "loss")
        voice.notice("an incident")
        voice.say("the end")
        told = capsys.readouterr()
        assert told.out == ""
        assert told.err == "torchrelay: the end\n"

    @pytest.mark.parametrize(
        ("kind", "told"),
        [
            (Kind.OPENED, "I-1: rank 2: SIGKILL"),
            (Kind.FAULT, "I-1: also rank 2: SIGKILL"),
            (Kind.RESOLVED, "rank 2: SIGKILL"),
            (Kind.WAITING, "rank 2: SIGKILL"),
            (Kind.DECIDED, ""),
            (Kind.SYMPTOM, ""),
            (Kind.PHASE, ""),
            (Kind.SUBMITTED, ""),
        ],
    )
    def test_notices_tell_of_incidents_and_of_nothing_else(self, kind: Kind, told: str) -> None:
        assert words_of(Note(kind=kind, text="rank 2: SIGKILL", job=JobId("job"), incident="I-1")) == told

    def test_the_last_line_says_how_it_ended_and_where_the_ledger_is(self) -> None:
        job = JobStatus(
            job=JobId("train"),
            phase="ended",
            why="",
            generation=Generation(3),
            world_size=4,
            step=120,
            step_ms=None,
            spares=SpareTally(wanted=1, warm=0, starting=0),
            incidents=IncidentTally(total=2, eligible=2, clean=2, open=0),
            restarts=0,
            joined=True,
            waiting_s=None,
            outcome=OutcomeView(code=0, reason="the script ended with 0 on every rank"),
        )
        told = "train ended with 0 after 120 steps; 2 incidents, 2 resolved clean; ledger: torchrelay report --run-dir"
        assert summary(job, "runs/train") == f"{told} runs/train"

    @pytest.mark.parametrize(("code", "told"), [(0, ""), (1, ""), (90, "--oversubscribe 2"), (91, "--max-restarts N")])
    def test_an_end_that_can_be_avoided_names_how(self, code: int, told: str) -> None:
        found = remedy(code, plan(["train.py"]).spec)
        assert told in found
        assert bool(found) is bool(told)
        tried = plan(["--oversubscribe", "2", "--max-restarts", "1", "--job", "tried", "train.py"]).spec
        assert remedy(code, tried) == ""


class TestNames:
    def test_two_runs_in_one_second_have_names_of_their_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Stopped(datetime):
            @classmethod
            def now(cls, tz: object = None) -> Stopped:  # noqa: ARG003
                return cls(2026, 1, 2, 3, 4, 5)

        monkeypatch.setattr("torchrelay.cli.launch.run.datetime", Stopped)
        found = [plan(["train.py"]) for _ in range(3)]
        assert [made.spec.job for made in found] == [
            "train-20260102-030405",
            "train-20260102-030405-2",
            "train-20260102-030405-3",
        ]
        assert [made.run_dir.name for made in found] == [made.spec.job for made in found]

    @pytest.mark.parametrize("words", [["--job", "mine"], ["--run-dir", "here"]])
    def test_a_folder_in_which_a_run_starts_is_not_taken_by_another(self, words: list[str]) -> None:
        first = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "import sys; from torchrelay.cli.launch.run import plan; "
                f"plan({[*words, 'train.py']});"
                "print('taken', flush=True); sys.stdin.read()",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert first.stdout is not None
        assert first.stdout.readline() == b"taken\n"
        with pytest.raises(NotPossible, match="in use by a run that starts") as caught:
            plan([*words, "train.py"])
        assert caught.value.code == 94
        first.communicate()
        assert plan([*words, "train.py"]), "a start that came to nothing keeps nobody out"
