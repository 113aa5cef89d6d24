"""What the docs claim is there: commands, links, targets, phases, and the plain word that no GPU has been near it."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchrelay.chaos.faults import Fault
from torchrelay.chaos.story import Act
from torchrelay.orchestrator.views.views import MOVE_PHASES, PHASES
from torchrelay.protocol.messages.orders import Verdict
from torchrelay.protocol.model.incident import UNSETTLED, Resolution
from torchrelay.protocol.model.job import JobPhase

ROOT = Path(__file__).parents[3]
DOCS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")])
README = (ROOT / "README.md").read_text()
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(text: str) -> Iterator[str]:
    """The lines of the unnamed code blocks: what a reader would type."""
    fence = ""
    for line in text.splitlines():
        if line.startswith("```"):
            fence = "" if fence else line
        elif fence == "```":
            yield line.strip()


def commands(program: str) -> list[tuple[str, list[str]]]:
    """(page, words) of every command of this program that the docs show."""
    found = []
    for path in DOCS:
        text = path.read_text()
        inline = re.findall(r"`([^`\n]+)`", text)
        for line in [*blocks(text), *inline]:
            if line.startswith(program + " "):
                found.append((name_of(path), shlex.split(line, comments=True)[1:]))
    return found


OF_TWO_WORDS = ("net",)  # verbs that have verbs of their own


def help_of(*verb: str) -> str:
    """What `torchrelay [verb] --help` says, on a terminal wide enough that nothing is cut."""
    words = [sys.executable, "-m", "torchrelay.cli.main", *verb, "--help"]
    wide = {**os.environ, "COLUMNS": "200", "TERM": "dumb"}
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=60, env=wide).stdout


def targets() -> dict[str, str]:
    """The targets of the Makefile, with the line that `make help` shows of them."""
    return dict(re.findall(r"^([a-z]+):.*?## (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("path", DOCS, ids=name_of)
def test_links_resolve(path: Path) -> None:
    links = [link for link in LINK.findall(path.read_text()) if "://" not in link]
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_the_files_that_the_docs_name_are_there() -> None:
    rooms = "|".join(path.name for path in (ROOT / "src" / "torchrelay").iterdir() if path.is_dir())
    missing = set()
    for path in DOCS:
        if "results" in path.parts:
            continue
        text = path.read_text()
        named = re.findall(r"\b((?:tests|bench|examples|src/torchrelay)/[a-z_/0-9]+\.py)", text)
        named += [
            f"src/torchrelay/{name}"
            for name in re.findall(rf"(?<!torchrelay/)(?<!unit/)\b((?:{rooms})/[a-z_/]+\.py)", text)
        ]
        missing |= {f"{name_of(path)}: {name}" for name in named if not (ROOT / name).exists()}
    assert missing == set()


def test_make_has_the_targets_that_the_docs_name() -> None:
    named = {word for _, words in commands("make") for word in words[:1] if "=" not in word}
    assert {"demo", "test", "check", "bench", "setup"} <= named
    assert named <= {"help", *targets()}


def test_make_help_says_what_every_target_does() -> None:
    told = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    phony = re.search(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    assert [name for name in phony[1].split() if f"make {name} " not in told] == []


def test_the_benches_that_the_docs_name_are_there() -> None:
    named = {name for path in DOCS for name in re.findall(r"bench NAME=(\w+)", path.read_text())}
    assert named
    assert [name for name in named if not (ROOT / "bench" / f"{name}.py").is_file()] == []


def test_the_verbs_that_the_docs_name_answer() -> None:
    named = sorted({words[0] for _, words in commands("torchrelay") if words and words[0].isalpha()})
    assert {"run", "status", "ranks", "incidents", "explain", "report", "doctor"} <= set(named)
    told = help_of()
    assert [verb for verb in named if not re.search(rf"\b{verb}\b", told)] == []


def test_the_flags_that_the_docs_name_are_taken() -> None:
    used: dict[tuple[str, ...], set[str]] = {}
    for _, words in commands("torchrelay"):
        script = next((at for at, word in enumerate(words) if word.endswith(".py")), len(words))
        flags = {word.split("=")[0] for word in words[:script] if word.startswith("-")}
        verb = words[:2] if words[0] in OF_TWO_WORDS else words[:1]
        used.setdefault(tuple(verb), set()).update(flags)
    for each, flags in used.items():
        if flags:
            told = help_of(*each)
            assert [flag for flag in sorted(flags) if flag not in told] == [], each


def test_the_modules_that_the_docs_run_are_there() -> None:
    named = {name for path in DOCS for name in re.findall(r"python -m ([\w.]+)", path.read_text())}
    named |= set(re.findall(r"\$\(PY\) -m ([\w.]+)", (ROOT / "Makefile").read_text()))
    installed = {"mkdocs"}  # by the target that runs it
    assert sorted(name for name in named - installed if importlib.util.find_spec(name) is None) == []


def test_the_readme_says_what_was_not_run() -> None:
    rows = [line for line in README.splitlines() if line.startswith("|")]
    assert any("GPU" in row and "not run" in row for row in rows)
    assert any("Slurm" in row and "not run" in row for row in rows)
    assert any("Kubernetes" in row and "planned" in row for row in rows)


def test_every_figure_has_its_command() -> None:
    figures = (ROOT / "docs" / "figures.md").read_text()
    rows = [line.split("|") for line in figures.splitlines() if "<!-- figure:" in line]
    assert rows
    assert [row for row in rows if "`make " not in row[2]] == []


def test_exit_codes_are_the_same_everywhere() -> None:
    def table(text: str) -> list[str]:
        return re.findall(r"^\| ((?:\d|1-79)[^|]*) \|", text.partition("Exit codes")[2], re.MULTILINE)

    page = (ROOT / "docs" / "exit-codes.md").read_text().partition("## What to do")[0]
    assert table(page) == table((ROOT / "ARCHITECTURE.md").read_text())
    assert len(table(page)) >= 10


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 150


def test_the_page_on_incidents_knows_every_phase_verdict_and_resolution() -> None:
    page = (ROOT / "docs" / "read-an-incident.md").read_text()
    words = [
        *Verdict,
        *(one for one in Resolution if one not in UNSETTLED),
        *(name for name, _ in (*PHASES, *MOVE_PHASES)),
    ]
    assert [word for word in words if f"`{word}`" not in page and f"| {word} |" not in page] == []


def test_every_page_is_in_the_site() -> None:
    nav = (ROOT / "mkdocs.yml").read_text()
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert sorted(page for page in pages if f": {page}" not in nav) == []


def test_the_protocol_page_knows_every_phase_and_verdict() -> None:
    page = (ROOT / "docs" / "protocol.md").read_text().lower()
    words = [*JobPhase, *Verdict, Resolution.CLEAN, Resolution.FELL_BACK]
    assert [word for word in words if word not in page] == []


def test_every_decision_is_in_the_index() -> None:
    index = (ROOT / "docs" / "decisions" / "README.md").read_text()
    pages = sorted(path.name for path in (ROOT / "docs" / "decisions").glob("[0-9]*.md"))
    assert pages
    assert [page for page in pages if f"]({page})" not in index] == []


def test_the_story_module_names_only_faults_that_exist() -> None:
    example = (ROOT / "examples" / "demo" / "story.txt").read_text()
    named = {line.split()[0] for line in example.splitlines() if line and not line.startswith("#")}
    assert named <= {*Fault, *Act}


def test_the_script_of_the_readme_is_the_script_of_the_examples() -> None:
    script = (ROOT / "examples" / "train_gpt.py").read_text()
    ours = [line.split("#")[0].strip() for line in script.splitlines() if line.endswith("# torchrelay")]
    calls = {node.attr for line in ours for node in ast.walk(parse(line)) if isinstance(node, ast.Attribute)}
    for name in ("protect", "step", "epochs", "batches", "atomic"):
        assert name in calls
        assert f".{name}" in README


def parse(line: str) -> ast.AST:
    """A line of a script, with whatever it needs around it to be parsed."""
    if line.startswith("@"):
        line += "\ndef f(): ..."
    return ast.parse(line + " ..." if line.endswith(":") else line)


def test_the_glossary_is_short() -> None:
    rows = [line for line in (ROOT / "GLOSSARY.md").read_text().splitlines() if line.startswith("| ")]
    heads = 2 * sum(line.startswith(("| word ", "| we do not say ")) for line in rows)
    assert len([line for line in rows if not line.startswith("|---")]) - heads // 2 <= 60
