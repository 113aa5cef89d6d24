"""The registry of verbs: each row leads to a function, a help text and a page of the reference; none is missing."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.house import imports
from torchrelay.cli.main import parser
from torchrelay.cli.registry import ROWS, VERBS, Family, Verb

ROOT = Path(__file__).parents[3]
CLI = ROOT / "src" / "torchrelay" / "cli"


@pytest.fixture(scope="module")
def site() -> ModuleType:
    """The site's own code, which makes the reference."""
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "docs" / "site_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def reached(first: set[str]) -> set[str]:
    """All modules of ours that these import, directly or not."""
    graph, found, ahead = imports(), set[str](), set(first)
    while ahead:
        found |= ahead
        ahead = {name for one in ahead for name in graph[one]} - found
    return found


@pytest.mark.parametrize("verb", ROWS, ids=lambda verb: verb.name)
def test_each_verb_leads_to_a_function_that_says_what_it_does(verb: Verb) -> None:
    assert (verb.load().__doc__ or "").strip()
    assert verb.help == verb.help.strip()
    assert verb.help[0].islower(), "it goes on after the verb"
    assert verb.help.endswith("...") or not verb.help.endswith("."), "the description adds it"


def test_a_verb_is_in_the_table_once() -> None:
    assert len(VERBS) == len(ROWS)


def test_every_family_is_a_room_and_has_a_verb() -> None:
    rooms = {path.name for path in CLI.iterdir() if (path / "__init__.py").exists()}
    assert rooms == set(Family) == {verb.family for verb in ROWS}


def test_no_module_of_a_verb_is_missing() -> None:
    modules = {name for name in imports() if name.startswith("torchrelay.cli.")}
    rooms = {f"torchrelay.cli.{family}" for family in Family}
    known = reached({verb.module for verb in ROWS} | {"torchrelay.cli.main"})
    assert sorted(modules - known - rooms) == []


def test_a_module_that_no_verb_needs_would_be_missing() -> None:
    assert "torchrelay.cli.view.explain" in reached({verb.module for verb in ROWS})
    assert "torchrelay.cli.view.explain" not in reached({verb.module for verb in ROWS if verb.name != "explain"})


def test_each_verb_has_a_page_in_the_reference(site: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "help_of", lambda verb: f"usage: torchrelay {verb}")
    page = site.command_line()
    for verb in ROWS:
        assert f"| [{verb.name}](#torchrelay-{verb.name}) | {verb.help} |" in page
        assert f"\n## torchrelay {verb.name}\n" in page


def test_verbs_that_change_something_ask_first() -> None:
    """Those with flags of their own say so themselves."""
    for verb in ROWS:
        told = parser().format_help() if verb.flags is None else help_of(verb)
        asks = "--dry-run" in told and "--yes" in told and "The plan is printed first" in told
        assert asks == (verb.changes and verb.flags is not None), verb.name


def help_of(verb: Verb) -> str:
    """The help of a verb whose flags the table has."""
    with pytest.MonkeyPatch.context() as patch:
        said: list[str] = []
        patch.setattr("argparse.ArgumentParser._print_message", lambda _, message, __=None: said.append(message))
        with pytest.raises(SystemExit):
            parser(verb.name).parse_args([verb.name, "--help"])
    return " ".join("".join(said).split())


def test_the_help_of_all_names_every_verb_with_its_line() -> None:
    told = " ".join(parser().format_help().split())
    assert [verb.name for verb in ROWS if f"{verb.name} {' '.join(verb.help.split())}" not in told] == []


def test_a_verbs_flags_are_the_same_when_it_is_asked_for_alone() -> None:
    words = ["ranks", "--rank", "3", "-w", "-o", "json"]
    assert parser("ranks").parse_args(words) == parser().parse_args(words)


def test_a_verb_imports_only_its_own_module() -> None:
    code = (
        "import sys; from torchrelay.cli.main import main\n"
        "try: main(['status', '--help'])\n"
        "except SystemExit: pass\n"
        "print([name for name in sys.modules if name.startswith('torchrelay.cli.') and name.count('.') > 2])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "['torchrelay.cli.launch.unprepared']"
