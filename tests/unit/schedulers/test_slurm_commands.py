"""A command that fails in any way is told as what it is, in time, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from tests.support.brain import until
from torchrelay.schedulers.slurm.commands import CommandFailed, Commands, clean


def program(folder: Path, text: str, name: str = "scontrol") -> Commands:
    """Slurm's command is this Python."""
    path = folder / name
    path.write_text(f"#!{sys.executable} -IS\nimport os, signal, sys, time\n{text}\n")
    path.chmod(0o755)
    return Commands({"PATH": str(folder), "SLURM_JOB_ID": "7", "SLURM_CONF": "/etc/x"}, deadline_s=5.0)


def run(commands: Commands, *words: str, deadline_s: float | None = None) -> str:
    async def story() -> str:
        async with asyncio.timeout(30):
            return (await commands.run("scontrol", *words, deadline_s=deadline_s)).out

    return asyncio.run(story())


def test_words_are_handed_over_as_they_are(tmp_path: Path) -> None:
    commands = program(tmp_path, "print(sys.argv[1:])")
    assert run(commands, "a b", "$HOME", "';rm -rf *") == str(["a b", "$HOME", "';rm -rf *"]) + "\n"


def test_the_allocation_that_we_are_in_is_not_handed_over(tmp_path: Path) -> None:
    commands = program(
        tmp_path, "print(sorted(name for name in os.environ if name.startswith('SLURM')), os.environ['TZ'])"
    )
    assert run(commands) == "['SLURM_CONF'] UTC\n"


def test_formats_and_defaults_of_the_user_do_not_change_what_we_read() -> None:
    kept = clean({"SQUEUE_FORMAT": "%i", "SALLOC_PARTITION": "x", "SLURM_TIME_FORMAT": "relative", "HOME": "/root"})
    assert kept == {"HOME": "/root", "LC_ALL": "C", "TZ": "UTC"}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("sys.exit('scontrol: error: Unable to contact slurm controller (connect failure)')",
         r"`scontrol show` ended with 1: .*connect failure\); is slurmctld running"),
        ("sys.exit('salloc: error: Invalid account or account/partition combination specified')", "name an account"),
        ("sys.exit(3)", r"`scontrol show` ended with 3: no word; try the command by hand"),
        ("print('x\\x1b[31m\\x00y', file=sys.stderr); print('z', file=sys.stderr); sys.exit(1)", r"x\?\[31m\?y; z"),
        ("os.kill(os.getpid(), 9)", "ended with -9"),
        ("sys.stderr.write('e' * 10_000_000); sys.exit(1)", r"e{50}\.\.\.;"),
    ],
)  # fmt: skip
def test_what_it_said_is_told_with_what_helps(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(CommandFailed, match=told) as failed:
        run(program(tmp_path, text), "show")
    assert failed.value.command == "scontrol"
    assert not failed.value.hung


def test_one_that_is_missing_or_no_program_is_told(tmp_path: Path) -> None:
    commands = program(tmp_path, "")
    (tmp_path / "scontrol").write_bytes(b"\x7fELF no")
    with pytest.raises(CommandFailed, match="scontrol cannot be run"):
        run(commands)
    (tmp_path / "scontrol").unlink()
    with pytest.raises(CommandFailed, match=r"scontrol is not on PATH: install Slurm's commands"):
        run(commands)


def test_one_that_prints_without_end_is_ended(tmp_path: Path) -> None:
    program(tmp_path, "while True: sys.stdout.write('x' * 100_000)")
    commands = Commands({"PATH": str(tmp_path)}, deadline_s=20.0, most_bytes=1 << 20)
    with pytest.raises(CommandFailed, match="printed more than 1048576 bytes"):
        run(commands)


def test_one_that_hangs_is_ended_with_what_it_said(tmp_path: Path) -> None:
    commands = program(tmp_path, "print('retrying', file=sys.stderr, flush=True); time.sleep(60)")
    with pytest.raises(CommandFailed, match=r"did not end within 0\.5 s: retrying;") as failed:
        run(commands, deadline_s=0.5)
    assert failed.value.hung


def test_a_child_that_it_leaves_behind_keeps_nobody_waiting(tmp_path: Path) -> None:
    text = "if os.fork() == 0:\n    time.sleep(20)\nelse:\n    print('done')"
    assert run(program(tmp_path, text), deadline_s=10.0) == "done\n"


def test_one_whose_asker_is_cancelled_may_take_its_request_back(tmp_path: Path) -> None:
    text = (
        "def back(*_):\n    open(sys.argv[1], 'w').close(); sys.exit(1)\n"
        "signal.signal(signal.SIGTERM, back); open(sys.argv[1] + '.on', 'w').close(); time.sleep(60)"
    )
    commands, mark = program(tmp_path, text), tmp_path / "back"

    async def story() -> None:
        asking = asyncio.create_task(commands.run("scontrol", str(mark)))
        await until("its start", (tmp_path / "back.on").exists)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    asyncio.run(story())
    assert mark.exists()


def test_the_event_loop_goes_on_meanwhile(tmp_path: Path) -> None:
    commands = program(tmp_path, f"while not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)")

    async def story() -> None:
        running = asyncio.create_task(commands.run("scontrol"))
        for _ in range(100):
            await asyncio.sleep(0)
        (tmp_path / "go").touch()
        await running

    asyncio.run(story())
