"""Examples: what a step is called with, without the values, so that the target of a move can rehearse it.

A rank that trains describes the arguments of its steps now and then; nothing of them is kept alive. The target makes
arguments of the same shape. Structure and plain values are told as they are, of tensors only what they look like.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from msgspec import Struct

from torchrelay.worker.parallel.ddp import Layout
from torchrelay.worker.tensors.reserve import Piece

EVERY = 1024  # calls from one description to the next
MAX_STEPS = 8  # step functions that are told apart; who defines one in each epoch has ever more
MAX_NODES = 4096  # in the arguments of one call
MAX_DEPTH = 32  # of lists in lists; who holds itself has no end
MAX_TEXT = 1 << 16  # letters or bytes of one plain value


class NotRehearsable(Exception):
    """Why a call cannot be made again elsewhere, in words."""


class Looks(Struct, array_like=True, tag="tensor"):
    """What a tensor looks like."""

    shape: tuple[int, ...]
    dtype: str
    device: str  # its type
    gradient: bool


class Plain(Struct, array_like=True, tag="plain"):
    """A value as it is."""

    value: Any


class Items(Struct, array_like=True, tag="items"):
    """A list or tuple, or a named tuple: then `module` and `name` say of which class."""

    kind: str
    items: list[Node]
    module: str = ""
    name: str = ""


class Pairs(Struct, array_like=True, tag="pairs"):
    """A dict."""

    keys: list[Any]
    values: list[Node]


Node = Looks | Plain | Items | Pairs


class Example(Struct, array_like=True):
    """What one step function was called with; or why that cannot be told; or neither: it was not called yet."""

    name: str  # of the function
    args: list[Node] = []
    kwargs: dict[str, Node] = {}
    called: bool = False
    refusal: str = ""


class Told(Struct, array_like=True):
    """What the target of a move is told: of each step function an example, what the optimizers keep, DDP's buckets.

    And what the stages and schedules of a pipeline have settled (see `pipeline.Told`).
    """

    examples: list[Example]
    pieces: list[Piece] = []
    layouts: list[Layout] = []
    stages: list[Any] = []
    schedules: list[Any] = []


_decoder = msgspec.msgpack.Decoder(Told)


class Shown:
    """One step function, and what it was called with a while ago."""

    __slots__ = ("_calls", "example", "function")

    def __init__(self, function: Callable[..., Any], keep: bool) -> None:
        self.function = function if keep else None
        self.example = Example(name_of(function))
        self._calls = 0

    def look(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """The function is called with these. In the path of every step: mostly nothing happens."""
        if self._calls % EVERY == 0:
            self.example = example_of(self.example.name, args, kwargs)
        self._calls += 1


class Examples:
    """The step functions of one script, in the order of their decoration."""

    def __init__(
        self,
        *,
        keep: bool = False,
        pieces: Callable[[], list[Piece]] = list,
        layouts: Callable[[], list[Layout]] = list,
        pipeline: Callable[[], tuple[list[Any], list[Any]]] = lambda: ([], []),
    ) -> None:
        """`keep`: hold on to the functions, to rehearse them. `pieces`, `layouts`, `pipeline`: see `Told`.

        The latter are called from any thread.
        """
        self._keep = keep
        self._pieces = pieces
        self._layouts = layouts
        self._pipeline = pipeline
        self._shown: list[Shown] = []

    def add(self, function: Callable[..., Any]) -> Shown:
        """A function is decorated."""
        shown = Shown(function, self._keep)
        if len(self._shown) < MAX_STEPS:
            self._shown.append(shown)
        return shown

    def functions(self) -> list[Callable[..., Any]]:
        """Those that were decorated so far, if they were kept; from now on they are not."""
        found = [shown.function for shown in self._shown if shown.function is not None]
        self._keep = False
        for shown in self._shown:
            shown.function = None
        return found

    def encoded(self) -> bytes:
        """All examples; nothing as long as no step was called. From any thread: each is replaced as a whole."""
        examples = [shown.example for shown in self._shown]
        if not any(example.called for example in examples):
            return b""
        return msgspec.msgpack.encode(Told(examples, self._pieces(), self._layouts(), *self._pipeline()))


def decode(data: bytes) -> Told:
    """Raises `ValueError` for bytes that are no examples."""
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise ValueError(f"{len(data)} bytes that are no examples: {error}") from error


def name_of(function: Callable[..., Any]) -> str:
    """By which the same function is known in another process."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return _sendable(f"{getattr(function, '__module__', '')}.{name}")


# ---------------------------------------------------------------- describing


def example_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Example:
    """The arguments of a call, described. Whatever they are, it raises nothing, and what it returns can be sent."""
    try:
        return _described(name, args, kwargs)
    except NotRehearsable as error:
        return Example(name, called=True, refusal=_sendable(str(error)))
    # They are the user's own objects, and to look at one may raise anything: that is no reason to end a healthy step.
    except Exception as error:  # noqa: BLE001
        return Example(name, called=True, refusal=f"its arguments cannot be described: {type(error).__name__}")


def _described(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Example:
    describe = _Describing()
    told = [describe(value, f"argument {at}") for at, value in enumerate(args)]
    named = {key: describe(value, f"argument {key}") for key, value in kwargs.items()}
    example = Example(name, told, named, called=True)
    msgspec.msgpack.encode(example)  # what cannot be sent is found out here, and not when somebody asks for it
    return example


def _sendable(text: str) -> str:
    """Python's strings may hold halves of letters, which no encoding takes."""
    return text.encode(errors="backslashreplace").decode()


def plain_in(example: Example) -> str:
    """Where its first plain value is that may decide something: a number or a text, and no flag. Empty if none is."""
    nodes = [(node, f"argument {at}") for at, node in enumerate(example.args)]
    nodes += [(node, f"argument {key}") for key, node in example.kwargs.items()]
    return next(filter(None, (_plain_in(node, path) for node, path in nodes)), "")


def _plain_in(node: Node, path: str) -> str:
    inner: list[tuple[Node, str]] = []
    match node:
        case Plain(value):
            return "" if value is None or isinstance(value, bool) else path
        case Items(_, items):
            inner = [(item, f"{path}[{at}]") for at, item in enumerate(items)]
        case Pairs(keys, values):
            if not all(isinstance(key, str) for key in keys):
                return path  # a number may count something, as a key, too
            inner = [(item, f"{path}[{key!r}]") for key, item in zip(keys, values, strict=True)]
    return next(filter(None, (_plain_in(item, at) for item, at in inner)), "")


class _Describing:
    """One description; `path` says in words where in the arguments a value is."""

    def __init__(self) -> None:
        self._left = MAX_NODES
        self._depth = 0

    def __call__(self, value: Any, path: str) -> Node:
        self._left -= 1
        if self._left < 0:
            raise NotRehearsable(f"its arguments have more than {MAX_NODES} parts")
        if self._depth > MAX_DEPTH:
            raise NotRehearsable(f"its arguments are nested more than {MAX_DEPTH} deep")
        self._depth += 1
        node = self._node(value, path)
        self._depth -= 1
        return node

    def _node(self, value: Any, path: str) -> Node:
        kind = type(value)
        if kind is torch.Tensor:
            return _looks(value, path)
        if kind is list or kind is tuple:
            return Items(kind.__name__, [self(item, f"{path}[{at}]") for at, item in enumerate(value)])
        if kind is dict:
            keys = [_plain(key, path) for key in value]
            return Pairs(keys, [self(item, f"{path}[{key!r}]") for key, item in value.items()])
        if issubclass(kind, tuple) and hasattr(kind, "_fields"):
            items = [self(item, f"{path}.{field}") for field, item in zip(kind._fields, value, strict=True)]
            return Items("named", items, kind.__module__, kind.__qualname__)
        return Plain(_plain(value, path))


def _looks(tensor: torch.Tensor, path: str) -> Looks:
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
        raise NotRehearsable(f"{path} is no plain dense tensor")
    name = str(tensor.dtype).removeprefix("torch.")
    return Looks(tuple(tensor.shape), name, tensor.device.type, tensor.requires_grad)


def _plain(value: Any, path: str) -> Any:
    kind = type(value)
    if value is None or kind in (bool, float):
        return value
    if kind is int and -(1 << 63) <= value < 1 << 63:
        return value
    if kind in (str, bytes) and len(value) <= MAX_TEXT:
        return value
    what = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    raise NotRehearsable(f"{path} is a {what}" if kind not in (int, str, bytes) else f"{path} is too large a {what}")


# ---------------------------------------------------------------- making


def arguments(example: Example, device: torch.device) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of this look. Tensors that were on a GPU are made on `device`. Raises `NotRehearsable`.

    Integers are zeros, which are valid as indices and labels; floats are small and random, from the global generators.
    """
    if example.refusal:
        raise NotRehearsable(example.refusal)
    args = [_make(node, device) for node in example.args]
    return args, {key: _make(node, device) for key, node in example.kwargs.items()}


def _make(node: Node, device: torch.device) -> Any:
    match node:
        case Plain(value):
            return value
        case Looks():
            return _tensor(node, device)
        case Pairs(keys, values):
            return {key: _make(item, device) for key, item in zip(keys, values, strict=True)}
        case Items(kind, items):
            made = [_make(item, device) for item in items]
            if kind == "named":
                return _named(node)(*made)
            return tuple(made) if kind == "tuple" else made


def _named(node: Items) -> Any:
    found: Any = sys.modules.get(node.module)
    for part in node.name.split("."):
        found = getattr(found, part, None)
    if not (
        isinstance(found, type) and issubclass(found, tuple) and len(getattr(found, "_fields", ())) == len(node.items)
    ):
        raise NotRehearsable(f"the named tuple {node.name} is not known here")
    return found


def _tensor(looks: Looks, device: torch.device) -> torch.Tensor:
    dtype = getattr(torch, looks.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise NotRehearsable(f"tensors of {looks.dtype} are not known here")
    where = torch.device("cpu") if looks.device == "cpu" else device
    if where.type != looks.device:
        raise NotRehearsable(f"its tensors are on a {looks.device}, and there is none here")
    if dtype.is_complex:
        made = torch.randn(looks.shape, dtype=dtype, device=where) * 0.1
    elif dtype.is_floating_point:
        made = (torch.randn(looks.shape, device=where) * 0.1).to(dtype)
    else:
        made = torch.zeros(looks.shape, dtype=dtype, device=where)
    return made.requires_grad_() if looks.gradient else made
