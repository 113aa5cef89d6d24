"""The commands that the pages for operators show, run as they stand there, in their order, on a job that trains."""

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

from tests.jobs import torchrelay, wait_until
from tests.ledger_lines import line
from torchrelay.client.client import Away, Client, Denied
from torchrelay.client.ledger_file import jsonl
from torchrelay.protocol.messages.ids import JobId

pytestmark = [pytest.mark.slow, pytest.mark.jobs, pytest.mark.timeout(300)]

ROOT = Path(__file__).parent.parent
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


def test_the_first_kill_goes_as_its_page_says(operator: Operator) -> None:
    run, *commands = shown("docs/first-kill.md")
    assert (run[0], [words[0] for words in commands]) == ("run", ["ranks", "chaos", "incidents", "explain"])
    operator.start(run)
    operator.until(step=5, warm=1)
    told = [operator.type(words) for words in commands]
    assert "outcome" in told[1]
    assert "clean" in told[2]
    assert all(phase in told[3] for phase in ("detect", "restore", "resume"))


@pytest.mark.soak
def test_a_job_is_operated_as_its_page_says(operator: Operator) -> None:
    """First the move, while its ranks are where it takes them from; then faults: the page speaks of incident 3."""
    operator.start(["run", "--nodes", "2", "--nproc-per-node", "2", "--spares", "2", "--spare-nodes", "1",
                    "examples/train_gpt.py", "--epochs", "1000"])  # fmt: skip
    operator.until(step=5, warm=4)
    commands = shown("docs/operate.md") + shown("docs/read-an-incident.md")
    faults = [words for words in commands if words[0] == "chaos"]
    assert len(faults) >= 3
    for words in [*(words for words in commands if words[0] == "migrate"), *faults]:
        operator.type(words)
    ours = [words for words in commands if words[0] not in ("chaos", "migrate", "run", "net")]
    told = {shlex.join(words): operator.type(words) for words in ours}
    assert len(told) >= 20
    assert "this is M-" in told["drain node-1 --reason 'new disks'"]
    assert told["explain I-3"].startswith("I-3")


PAGES = ("README.md", "docs/economics.md", "docs/simulator.md", "docs/guarantee.md")
QUICK = {"simulate": ["--runs", "1", "--days", "2"]}  # how long it computes is the reader's choice
TRACE = "start,end,node,cause\n1,2,a,GPU\n30,40,b,NIC\n50,51,a,GPU\n"


def computed() -> list[list[str]]:
    found = [words for page in PAGES for words in shown(page) if words[0] in ("cost", "simulate", "report")]
    return [words for words in found if "ettr-table" not in words]  # minutes; tests/test_cli_simulate.py has it


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the ledgers of two runs, and a trace of faults."""
    folder = tmp_path_factory.mktemp("computed")
    (folder / "faults.csv").write_text(TRACE)
    for path in (folder / "ledger.jsonl", folder / "torchrelay-runs" / "train-7" / "ledger.jsonl"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(jsonl([replace(line(), job=JobId("train-7"), id=f"I-{at}") for at in range(1, 101)]))
    return folder


@pytest.mark.parametrize("words", computed(), ids=shlex.join)
def test_what_is_computed_is_computed_as_its_page_says(words: list[str], folder: Path) -> None:
    if words[0] == "report" and "--ledger" not in words:
        words = [*words, "--ledger", "torchrelay-runs/train-7/ledger.jsonl"]  # else it asks a run
    words = [found for word in words for found in (sorted(map(str, folder.glob(word))) if "*" in word else [word])]
    done = torchrelay(*words, *QUICK.get(words[0], []), cwd=folder, timeout_s=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout
