"""Codec: messages to msgpack bytes and back. Strict and bounded; whatever does not decode is a `WireError`.

Values are never coerced ("1" is not 1), types come from the message's tag, and nothing that arrives is ever evaluated.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Struct

from torchrelay.protocol.messages.events import AnyEvent
from torchrelay.protocol.messages.orders import AnyOrder

MAX_MESSAGE = 64 << 20  # bytes; the largest message is a worker's end with its private state: up to 4 MiB
T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()


class WireError(ValueError):
    """What arrived, or was to be sent, is not a message of ours: too large, cut off, or of another shape."""


def encode(message: Struct) -> bytes:
    """Encode one message. Raises `WireError` if it is larger than `MAX_MESSAGE`."""
    data = _encoder.encode(message)
    if len(data) > MAX_MESSAGE:
        raise WireError(f"{type(message).__name__} has {len(data)} bytes, at most {MAX_MESSAGE} are sent")
    return data


class Codec(Generic[T]):
    """Decodes one family of messages, a union of tagged structs: `Codec[AnyEvent](AnyEvent, "event")`."""

    def __init__(self, family: Any, name: str) -> None:
        self.name = name
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(family)

    def decode(self, data: bytes | bytearray | memoryview) -> T:
        """Decode one message. Raises `WireError`, never anything else, for what is not one."""
        if len(data) > MAX_MESSAGE:
            raise WireError(f"{self.name} of {len(data)} bytes, at most {MAX_MESSAGE} are read")
        try:
            return self._decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, OverflowError, RecursionError) as error:
            raise WireError(f"not a valid {self.name}: {error}") from error


_events: Codec[AnyEvent] = Codec(AnyEvent, "event")
_orders: Codec[AnyOrder] = Codec(AnyOrder, "order")


def decode_event(data: bytes | bytearray | memoryview) -> AnyEvent:
    """Decode one event of the protocol."""
    return _events.decode(data)


def decode_order(data: bytes | bytearray | memoryview) -> AnyOrder:
    """Decode one order of the protocol."""
    return _orders.decode(data)
