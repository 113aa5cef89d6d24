"""Inheritance: the WebSocket between the head and an heir. Every message is one binary frame of msgpack.

The heir connects to `HEIR_PATH` with the run's pass for agents, and says `Inherit` with the key that the head had given
to its node's agent (`Appoint`). Then:

    head -> heir   Bequest, the whole journal in as many `Piece`s as it takes, and each part of it as it is written
    heir -> head   Holds: the whole, and then each part, is on its disk
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from torchrelay.protocol.messages.ids import NodeId
from torchrelay.protocol.succession.succession import CopyId
from torchrelay.wire.messages.codec import Codec

HEIR_PATH = "/heir"
PIECE = 4 << 20  # bytes


class Inherit(Struct, frozen=True, tag=True, kw_only=True):
    """Whoever comes for a copy of the journal."""

    node: NodeId
    copy: CopyId
    key: str

    def __repr__(self) -> str:
        return f"Inherit(node={self.node!r}, copy={self.copy!r})"  # a key must not reach a log


class Holds(Struct, frozen=True, tag=True, kw_only=True):
    """This part is on the heir's disk, and all before it. `url`: where it listens."""

    part: int
    url: str = ""


class Bequest(Struct, frozen=True, tag=True, kw_only=True):
    """What an orchestrator has besides its journal, and how large the journal is after its newest part.

    `passes`: of all roles; the heir's node is trusted with them. `launch`: what is run, as its file says.
    """

    passes: dict[str, str]
    launch: bytes
    part: int
    size: int
    patience_s: float
    slurm_job: int = 0
    launcher: NodeId = NodeId("")  # the node on which `torchrelay run` was started

    def __repr__(self) -> str:
        return f"Bequest(part={self.part}, size={self.size})"  # secrets must not reach a log


class Piece(Struct, frozen=True, tag=True):
    """So many bytes of the journal's file."""

    data: Annotated[bytes, Meta(max_length=PIECE)]


class Part(Struct, frozen=True, tag=True):
    """What the head has written in one go: rows of its tables, each of a kind. Their values are checked by the heir."""

    number: int
    rows: tuple[tuple[str, tuple[Any, ...]], ...]


ToHeir = Bequest | Piece | Part
FromHeir = Inherit | Holds

_to_heir: Codec[ToHeir] = Codec(ToHeir, "message to an heir")
_from_heir: Codec[FromHeir] = Codec(FromHeir, "message from an heir")


def decode_to_heir(data: bytes | bytearray | memoryview) -> ToHeir:
    """Decode a message of the head. Raises `WireError`."""
    return _to_heir.decode(data)


def decode_from_heir(data: bytes | bytearray | memoryview) -> FromHeir:
    """Decode a message of an heir. Raises `WireError`."""
    return _from_heir.decode(data)
