"""What tests of docs commands share."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.support.jobs import torchrelay, wait_until
from tests.support.ledger_lines import line
from torchrelay.client.client import Away, Client, Denied
from torchrelay.client.ledger_file import jsonl
from torchrelay.protocol.messages.ids import JobId

ROOT = Path(__file__).parents[2]
TINY = ("--params", "tiny", "--epoch-steps", "20", "--batch", "2", "--warmup", "4", "--log-every", "5")
CHANGES = ("drain", "undrain", "cordon", "uncordon", "taint", "untaint", "migrate", "freeze", "unfreeze", "chaos",
           "restart-services")  # fmt: skip
# A page shows what a person types, and a person answers questions and has half an hour.
SHORTER = {"--repeat 10": "--repeat 2", "--every 30s": "--every 1s", " train.py": " examples/train_gpt.py"}


def shown(page: str) -> list[list[str]]:
    """The words of every command of ours in the code blocks of a page, in order."""
    blocks = re.findall(r"^```\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("torchrelay ")]
    for long, short in SHORTER.items():
        lines = [line.replace(long, short) for line in lines]
    return [shlex.split(line, comments=True)[1:] for line in lines]


class Operator:
    """A person in a folder with the examples, and the job that was started there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "examples").symlink_to(ROOT / "examples")
        self.job: subprocess.Popen[bytes] | None = None

    def start(self, words: list[str]) -> None:
        command = [sys.executable, "-m", "torchrelay.cli.main", *words, *TINY]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with (self.folder / "printed").open("w") as out:
            self.job = subprocess.Popen(command, cwd=self.folder, env=environment, stdout=out, stderr=subprocess.STDOUT)

    def type(self, words: list[str]) -> str:
        """What a command prints. It must succeed."""
        sure = ["--yes"] if words[0] in CHANGES and "--yes" not in words else []
        done = torchrelay(*words, *sure, cwd=self.folder, timeout_s=120)
        assert done.returncode == 0, f"torchrelay {shlex.join(words)}\n{done.stdout}{done.stderr}\n{self.printed()}"
        return done.stdout

    def printed(self) -> str:
        return (self.folder / "printed").read_text()[-3000:]

    def until(self, *, step: int, warm: int) -> None:
        def come() -> bool:
            assert self.job is not None
            assert self.job.poll() is None, self.printed()
            for run_dir in (self.folder / "torchrelay-runs").glob("*"):
                try:
                    job = Client.of(run_dir).job()
                except (Away, Denied, LookupError):
                    continue  # it is being started
                return (job.step or 0) >= step and job.spares.warm >= warm
            return False

        wait_until(f"step {step} and {warm} warm spares", come, deadline_s=120)

    def end(self) -> None:
        if self.job is not None:
            self.job.terminate()
            self.job.wait(60)


@pytest.fixture
def operator(tmp_path: Path) -> Iterator[Operator]:
    one = Operator(tmp_path)
    yield one
    one.end()


PAGES = ("README.md", "docs/economics.md", "docs/simulator.md", "docs/guarantee.md")
TRACE = "start,end,node,cause\n1,2,a,GPU\n30,40,b,NIC\n50,51,a,GPU\n"


def computed() -> list[list[str]]:
    found = [words for page in PAGES for words in shown(page) if words[0] in ("cost", "simulate", "report")]
    return [
        words for words in found if "ettr-table" not in words
    ]  # minutes; tests/unit/forecast/test_cli_simulate.py has it


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the ledgers of two runs, and a trace of faults."""
    folder = tmp_path_factory.mktemp("computed")
    (folder / "faults.csv").write_text(TRACE)
    for path in (folder / "ledger.jsonl", folder / "torchrelay-runs" / "train-7" / "ledger.jsonl"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(jsonl([replace(line(), job=JobId("train-7"), id=f"I-{at}") for at in range(1, 101)]))
    return folder
