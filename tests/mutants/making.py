"""Making mutants: one change to the syntax tree of a module, with a name that stays when lines move."""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

PROTOCOL = Path(__file__).parent.parent.parent / "src" / "torchrelay" / "protocol"
MODULES = (
    "answers", "boundary", "buddies", "cluster", "deaths", "ending", "facts", "incident", "job", "migration",
    "moves", "parking", "parts", "phases", "placing", "policy", "records", "recovery", "replicas", "requests",
    "rollback", "roster", "sharing", "silence", "speech", "stalls", "standing", "state", "stopping", "table", "taints",
    "deafness", "failure_detector", "pulses", "silent_nodes", "wait_for_graph",
    "candidate", "copying", "door", "head", "search", "succession", "voter",
)  # fmt: skip

OPPOSITE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
SWAPPED = {"max": "min", "min": "max", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutant:
    """The n-th change of a module. `name`: module, function, change, and a number if it is there more than once."""

    module: str
    number: int
    name: str
    line: int

    def tree(self) -> ast.Module:
        """The changed module."""
        tree = parsed(self.module)
        _, _, _, apply = next(islice(changes(tree), self.number, None))
        apply()
        return ast.fix_missing_locations(tree)


# A place in a tree: the node, what is changed, and how to do it.
Change = tuple[ast.AST, str, Callable[[], None]]


def path_of(module: str) -> Path:
    """Where it is; its name is enough, as no two rooms have one of the same name."""
    (path,) = PROTOCOL.glob(f"*/{module}.py")
    return path


def parsed(module: str) -> ast.Module:
    return ast.parse(path_of(module).read_text())


def mutants(module: str) -> list[Mutant]:
    """All mutants of a module."""
    made: list[Mutant] = []
    names: Counter[str] = Counter()
    for number, (where, node, what, _) in enumerate(changes(parsed(module))):
        name = f"{module}:{where}: {what}"
        names[name] += 1
        again = f" #{names[name]}" if names[name] > 1 else ""
        made.append(Mutant(module, number, name + again, getattr(node, "lineno", 0)))
    return made


def changes(tree: ast.Module) -> Iterator[tuple[str, ast.AST, str, Callable[[], None]]]:
    """Every change that can be made to a module: (function, node, what is changed, how)."""
    for where, node, parent, field, index in list(places(tree, "", None, "", None)):
        for changed, what, apply in changes_at(node, parent, field, index):
            yield where, changed, what, apply


Place = tuple[str, ast.AST, ast.AST | None, str, int | None]


def places(node: ast.AST, where: str, parent: ast.AST | None, field: str, index: int | None) -> Iterator[Place]:
    """All nodes of code, with their place. Annotations, docstrings, texts, assertions and the makings of a
    class are no code to us.
    """
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        where = f"{where}.{node.name}".lstrip(".")
    if isinstance(node, ast.Assert | ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom | ast.arguments):
        return
    yield where or "module", node, parent, field, index
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases", "type_params"):
            continue
        if name == "keywords" and isinstance(node, ast.ClassDef):
            continue
        if isinstance(value, ast.AST):
            yield from places(value, where, node, name, None)
        elif isinstance(value, list):
            for number, each in enumerate(value):
                if isinstance(each, ast.AST):
                    yield from places(each, where, node, name, number)


def changes_at(node: ast.AST, parent: ast.AST | None, field: str, index: int | None) -> Iterator[Change]:
    """The changes of one node."""
    if parent is not None and isinstance(node, ast.expr):
        yield from changes_of_expression(node, parent, field, index)
    if isinstance(node, ast.stmt) and parent is not None and index is not None:
        yield from changes_of_statement(node, parent, field, index)
    if isinstance(node, ast.Compare) and type(node.ops[0]) in OPPOSITE and not is_negated(node, field):
        other = OPPOSITE[type(node.ops[0])]
        yield node, f"{short(node)} by {other.__name__}", partial(node.ops.__setitem__, 0, other())
    if isinstance(node, ast.comprehension):
        for number, condition in enumerate(node.ifs):
            yield condition, f"for all, not if {short(condition)}", partial(node.ifs.__delitem__, number)
            yield condition, f"for if not {short(condition)}", negation(node, "ifs", number, condition)
    if isinstance(node, ast.Call):
        yield from changes_of_call(node)
    if isinstance(node, ast.Dict | ast.Set | ast.Tuple):
        yield from changes_of_display(node)
    if isinstance(node, ast.match_case) and parent is not None and node.guard is not None:
        guard = node.guard
        yield guard, f"case without {short(guard)}", lambda: setattr(node, "guard", None)


def changes_of_expression(node: ast.expr, parent: ast.AST, field: str, index: int | None) -> Iterator[Change]:
    if field == "test" and not isinstance(node, ast.BoolOp):
        yield node, f"not {short(node)}", negation(parent, field, index, node)
    if isinstance(node, ast.BoolOp):
        for number, value in enumerate(node.values):
            yield value, f"{short(node)} without {short(value)}", dropping(node, number)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not) and field != "test":
        yield node, f"{short(node)} without not", putting(parent, field, index, node.operand)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        sign = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
        if not has_text(node):
            yield node, f"{short(node)} by {type(sign).__name__}", lambda: setattr(node, "op", sign)
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        more = node.value * 2 + 1
        yield node, f"{node.value} to {more}", putting(parent, field, index, ast.Constant(more))
    if isinstance(node, ast.Constant) and isinstance(node.value, bool) and field == "value":
        yield node, f"{node.value} to {not node.value}", putting(parent, field, index, ast.Constant(not node.value))
    if isinstance(node, ast.IfExp):
        yield node, f"always {short(node.body)}", putting(parent, field, index, node.body)
        yield node, f"always {short(node.orelse)}", putting(parent, field, index, node.orelse)


def changes_of_statement(node: ast.stmt, parent: ast.AST, field: str, index: int) -> Iterator[Change]:
    """Statements that can be left out: assignments to a name that is bound before, calls, yields, whole branches."""
    if isinstance(node, ast.Assign) and rebinds(node):
        yield node, f"without {short(node)}", putting(parent, field, index, ast.Pass())
    if isinstance(node, ast.AugAssign | ast.Continue | ast.Break):
        yield node, f"without {short(node)}", putting(parent, field, index, ast.Pass())
    if isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant):
        yield node, f"without {short(node)}", putting(parent, field, index, ast.Pass())
    if isinstance(node, ast.If):
        yield node, f"without if {short(node.test)}", putting(parent, field, index, node.orelse or ast.Pass())
    if isinstance(node, ast.Return) and isinstance(node.value, ast.Call) and names_in(node.value) & {"cluster", "job"}:
        kept = "cluster" if "cluster" in names_in(node.value) else "job"
        only = ast.Return(ast.Name(kept, ast.Load()))
        yield node, f"return {kept}, not {short(node.value)}", putting(parent, field, index, only)


def changes_of_call(node: ast.Call) -> Iterator[Change]:
    if isinstance(node.func, ast.Name) and node.func.id in SWAPPED:
        name, other = node.func.id, SWAPPED[node.func.id]
        yield node, f"{short(node)} by {other}", lambda: setattr(node.func, "id", other)
        del name
    # What a new value is made of: leave one field as it was, or as it is by default.
    for number, keyword in enumerate(node.keywords):
        if keyword.arg is not None and isinstance(node.func, ast.Name):
            what = f"{node.func.id} without {keyword.arg}={short(keyword.value)}"
            yield keyword, what, lambda number=number: node.keywords.pop(number)  # type: ignore[misc]


def changes_of_display(node: ast.Dict | ast.Set | ast.Tuple) -> Iterator[Change]:
    """Leave out one entry of a table or of a set of phases."""
    if isinstance(node, ast.Dict):
        for number, key in enumerate(node.keys):
            if key is not None:
                yield key, f"table without {short(key)}", lambda number=number: drop_entry(node, number)  # type: ignore[misc]
    elif isinstance(getattr(node, "ctx", ast.Load()), ast.Load) and all(
        isinstance(e, ast.Attribute) for e in node.elts
    ):
        for number, entry in enumerate(node.elts):
            yield entry, f"{short(node)} without {short(entry)}", lambda number=number: node.elts.pop(number)  # type: ignore[misc]


# ---------------------------------------------------------------- how


def putting(parent: ast.AST, field: str, index: int | None, new: ast.AST | list[ast.stmt]) -> Callable[[], None]:
    """Put something else in the place of a node."""

    def put() -> None:
        if index is None:
            setattr(parent, field, new)
            return
        place = getattr(parent, field)
        place[index : index + 1] = new if isinstance(new, list) else [new]

    return put


def is_negated(node: ast.Compare, field: str) -> bool:
    """Whether the opposite comparison is the negation of a condition, which is a mutant already."""
    return field == "test" and not isinstance(node.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE)


def negation(parent: ast.AST, field: str, index: int | None, node: ast.expr) -> Callable[[], None]:
    return putting(parent, field, index, ast.UnaryOp(ast.Not(), copy.deepcopy(node)))


def dropping(node: ast.BoolOp, number: int) -> Callable[[], None]:
    def drop() -> None:
        node.values.pop(number)
        if len(node.values) == 1:
            node.values.append(copy.deepcopy(node.values[0]))

    return drop


def drop_entry(node: ast.Dict, number: int) -> None:
    node.keys.pop(number)
    node.values.pop(number)


# ---------------------------------------------------------------- what


def short(node: ast.AST) -> str:
    """A node on one line, for names."""
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 70 else f"{text[:67]}..."


def rebinds(node: ast.Assign) -> bool:
    """Whether the assigned name is also read, so that leaving the assignment out still runs."""
    names = {target.id for target in node.targets if isinstance(target, ast.Name)}
    return bool(names & names_in(node.value))


def names_in(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def has_text(node: ast.AST) -> bool:
    return any(isinstance(each, ast.Constant) and isinstance(each.value, str) for each in ast.walk(node))
