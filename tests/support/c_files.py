"""What is in a C file or a header, as far as one has to know it to say who uses whom."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
MACRO = re.compile(r"^#define (\w+)", re.MULTILINE)
DIRECTIVE = re.compile(r"^#(?:[^\n]*\\\n)*[^\n]*", re.MULTILINE)
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
QUOTED = re.compile(r""""(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'""")
ATTRIBUTE = re.compile(r"__attribute__\s*\(\((?:[^()]|\([^()]*\))*\)\)")
MEMBER = re.compile(r"(?:->|\.)\s*\w+")
NAME = re.compile(r"[A-Za-z_]\w*")
FUNCTION = re.compile(r"[^()=]*?\b(\w+)\s*\(.*\)", re.DOTALL)
POINTER = re.compile(r"\(\*(\w+)\)")
VARIABLE = re.compile(r"(\w+)\s*(?:\[[^\]]*\]\s*)*$")
TYPE_ALONE = re.compile(r"(?:enum|struct|union)\b\s*\w*\s*(?:\{\})?")
CONSTANT = re.compile(r"(?:^|,)\s*(\w+)")


@dataclass
class CFile:
    """The names in a file."""

    includes: set[str] = field(default_factory=set)  # of our own headers, without folders
    defined: set[str] = field(default_factory=set)  # functions and variables that others may use
    private: set[str] = field(default_factory=set)  # static ones
    declared: set[str] = field(default_factory=set)  # functions and variables that are defined elsewhere
    others: set[str] = field(default_factory=set)  # types, constants and macros
    used: set[str] = field(default_factory=set)  # whatever is named, but for members of structs


def read(text: str) -> CFile:
    """Read C as it is written here: no macro hides a brace, and whoever defines a variable defines no other with it.

    A local variable with the name of another file's function counts as a use of that. Better give it another name.
    """
    text = COMMENT.sub("", text)
    found = CFile(includes={name.rpartition("/")[2] for name in INCLUDE.findall(text)})
    code = ATTRIBUTE.sub("", QUOTED.sub('""', DIRECTIVE.sub("", text)))
    found.used = set(NAME.findall(MEMBER.sub(" ", code)))
    found.others = set(MACRO.findall(text))
    head, start = "", 0
    for at, end in outermost(code):
        head = f"{head}{code[start:at]}".strip()
        start = end
        if code[at] == ";":
            take_declaration(head, found)
            head = ""
        elif function := FUNCTION.fullmatch(head):
            (found.private if head.startswith("static ") else found.defined).add(function[1])
            head = ""
        else:
            take_contents(head, code[at + 1 : end - 1], found)
            head += " {} "
    return found


def outermost(code: str) -> Iterator[tuple[int, int]]:
    """Where each `;` and each pair of braces that is in no braces begins and ends."""
    depth = begun = 0
    for at, each in enumerate(code):
        if each == "{":
            begun = begun if depth else at
            depth += 1
        elif each == "}":
            depth -= 1
            if depth == 0:
                yield begun, at + 1
        elif each == ";" and depth == 0:
            yield at, at + 1


def take_contents(head: str, inside: str, found: CFile) -> None:
    """The constants of an enum, or the tag of a struct; braces after `=` hold values."""
    words = head.split()
    if "=" in words:
        return
    if "enum" in words:
        found.others |= set(CONSTANT.findall(re.sub(r"\([^()]*\)", "", inside)))
    elif "struct" in words[:-1]:
        found.others.add(words[-1])


def take_declaration(head: str, found: CFile) -> None:
    words = NAME.findall(head)
    if words[0] == "typedef":
        pointer = POINTER.search(head)
        function = FUNCTION.fullmatch(head)
        found.others.add(pointer[1] if pointer else function[1] if function else words[-1])
    elif words[0] == "_Static_assert" or TYPE_ALONE.fullmatch(head):
        return
    elif function := FUNCTION.fullmatch(head):
        (found.private if words[0] == "static" else found.declared).add(function[1])
    else:
        kind = {"static": found.private, "extern": found.declared}.get(words[0], found.defined)
        kind.update(VARIABLE.findall(head.partition("=")[0].strip()))
