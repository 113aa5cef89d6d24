"""The house of the network core: no C file leads back to where it came from, and each includes exactly what it uses."""

from __future__ import annotations

import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.support.c_files import read
from tests.support.native_house import CORE, FACE, ROOT, Files, core, owners, sources, uses

Graph = dict[str, set[str]]


def of_texts(**texts: str) -> Files:
    """Files from small texts: `a_c` is a.c."""
    return {name.replace("_", "."): read(text) for name, text in texts.items()}


def calls(files: Files) -> Graph:
    """By C file, the C files that define what it uses."""
    owned = owners(files)
    return {name: {owned[each] for each in used} for name, used in uses(files).items()}


def includes(files: Files) -> Graph:
    """By part, the parts whose headers its C file or its header includes. a.c and a.h are one part."""
    graph: Graph = {Path(name).stem: set() for name in files}
    for name, file in files.items():
        part = Path(name).stem
        graph[part] |= {Path(each).stem for each in file.includes} - {part}
    return graph


def circle(graph: Graph) -> list[str]:
    """One circle, from a file back to itself; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def not_included(files: Files) -> list[str]:
    """What is used without the header that declares it; a header that another header brings along does not count."""
    wrong = []
    for name, used in uses(files).items():
        at_hand = {each for header in files[name].includes if header in files for each in files[header].declared}
        wrong += [f"{name} uses {each} without its header" for each in sorted(used - at_hand)]
    return wrong


def idle_includes(files: Files) -> list[str]:
    """Headers of which a C file uses nothing. Its own it includes always, so that the compiler compares them."""
    wrong = []
    for name, file in sources(files).items():
        for header in file.includes & files.keys():
            if Path(header).stem != Path(name).stem and not file.used & (files[header].declared | files[header].others):
                wrong.append(f"{name} uses nothing of {header}")
    return sorted(wrong)


def misplaced(files: Files) -> list[str]:
    """What a header declares of another C file than its own; what a C file offers to others without its header."""
    owned, wrong = owners(files), []
    for name, file in files.items():
        stem = Path(name).stem
        if name.endswith(".c"):
            own = {f"{stem}.h", FACE} & file.includes & files.keys()
            at_hand = {each for header in own for each in files[header].declared}
            wrong += [f"{each} of {name} is in no header of it" for each in file.defined - at_hand]
        elif name != FACE:
            foreign = {each: owned.get(each) for each in file.declared if owned.get(each) != f"{stem}.c"}
            wrong += [f"{name} declares {each} of {owner}" for each, owner in foreign.items()]
    return sorted(wrong)


def test_no_call_leads_back() -> None:
    graph = calls(core())
    assert sum(map(len, graph.values())) > 2 * len(graph), "most of the calls were not seen"
    assert circle(graph) == []


def test_no_include_leads_back() -> None:
    assert circle(includes(core())) == []


def test_each_file_includes_what_it_uses_and_nothing_else() -> None:
    files = core()
    assert not_included(files) == []
    assert idle_includes(files) == []


def test_each_header_is_of_one_file() -> None:
    assert misplaced(core()) == []


def test_the_architecture_names_each_part() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text().partition("## Paths: below the collectives")[2].partition("\n## ")[0]
    parts = {path.stem for path in CORE.glob("*.[ch]")}
    assert sorted(part for part in parts if not re.search(rf"(?:^ +|/|, ){part}[ ,]", text, re.MULTILINE)) == []


# ---------------------------------------------------------------- the tests of these tests


def test_a_circle_of_calls_is_found() -> None:
    a, b = "int a(void) { return b(); }", "static int helper(void) { return a(); }\nint b(void) { return helper(); }"
    assert set(circle(calls(of_texts(a_c=a, b_c=b)))) == {"a.c", "b.c"}
    assert circle(calls(of_texts(a_c=a, b_c=b.replace("a()", "1")))) == []


def test_a_circle_over_a_third_file_is_found() -> None:
    files = of_texts(
        a_c="int a(void) { return b(); }", b_c="int b(void) { return c(); }", c_c="int c(void) { return a(); }"
    )
    assert set(circle(calls(files))) == {"a.c", "b.c", "c.c"}


@pytest.mark.parametrize(
    "body",
    [
        "int b(void) { return shared; }",
        "int b(void) { return shared.field[0]; }",
        "int b(void) { return begin(a); }",
        "static int (*const table[])(void) = {a};\nint b(void) { return 0; }",
        '__attribute__((format(printf, 1, 2))) int b(const char *f, ...) { return f == "" ? a() : 0; }',
    ],
    ids=["a variable", "its member", "a pointer", "a table", "an attribute"],
)
def test_whatever_is_used_counts(body: str) -> None:
    a = "struct { int field[2]; } shared = {{1, 2}};\nint a(void) { return b(); }"
    assert set(circle(calls(of_texts(a_c=a, b_c=body)))) == {"a.c", "b.c"}


@pytest.mark.parametrize(
    "body",
    [
        "int b(void) { return 0; } // a()",
        "int b(void) { /* a() */ return 0; }",
        'int b(void) { return say("a()"); }',
        "int b(void) { return it->a + it.a; }",
        "static int a(void) { return 0; }\nint b(void) { return a(); }",
    ],
    ids=["a comment", "a long comment", "a text", "a member", "a static one of that name"],
)
def test_what_is_not_used_does_not(body: str) -> None:
    assert calls(of_texts(a_c="int a(void) { return b(); }", b_c=body))["b.c"] == set()


def test_a_header_that_is_missing_or_comes_along_is_found() -> None:
    headers = {"a_h": "int a(void);", "b_h": '#include "a.h"\nint b(void);'}
    a, b = '#include "a.h"\nint a(void) { return 0; }', '#include "b.h"\nint b(void) { return a(); }'
    assert not_included(of_texts(**headers, a_c=a, b_c=b)) == ["b.c uses a without its header"]
    assert not_included(of_texts(**headers, a_c=a, b_c=f'#include "../a.h"\n{b}')) == []


def test_a_header_that_is_not_needed_is_found() -> None:
    a, b = "enum { MOST = 4 };\ntypedef struct { int x; } thing;\nint a(void);", '#include "a.h"\nint b(void) { %s; }'
    assert idle_includes(of_texts(a_h=a, b_c=b % "return 0")) == ["b.c uses nothing of a.h"]
    for used in ("return MOST", "thing one", "return a()"):
        assert idle_includes(of_texts(a_h=a, b_c=b % used)) == []


def test_a_circle_of_headers_is_found() -> None:
    files = of_texts(a_h='#include "b.h"\n', b_c='#include "b.h"\n#include "a.h"\n', b_h="int b(void);", a_c="")
    assert set(circle(includes(files))) == {"a", "b"}


def test_a_header_for_two_files_is_found() -> None:
    files = of_texts(
        a_h="int a(void);\nint b(void);\nextern int c;",
        a_c='#include "a.h"\nint a(void) { return 0; }',
        b_c='#include "a.h"\nint b(void) { return 0; }\nint c = 1;',
    )
    assert misplaced(files) == [
        "a.h declares b of b.c",
        "a.h declares c of b.c",
        "b of b.c is in no header of it",
        "c of b.c is in no header of it",
    ]
