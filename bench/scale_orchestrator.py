"""The orchestrator of the scale bench: the real one, which also notes when it sent and heard what.

What players see of an order comes later than it was sent: they are busy with thousands of others on the same cores.
SIGUSR1 writes down what was noted.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from torchrelay.orchestrator import __main__ as entry
from torchrelay.orchestrator.core import agents
from torchrelay.protocol.messages.orders import Interrupts
from torchrelay.wire.messages.channel import EventsFrame, OrderFrame, decode_to_orchestrator
from torchrelay.wire.messages.codec import encode

NOTES = "noted.json"
Noted = dict[str, dict[int, list[float]]]  # a kind -> a generation -> how many, when the last one, CPU seconds then


def note(noted: Noted, messages: Sequence[Any]) -> None:
    """What goes out, or has come in, in one frame. It is done in the time that is measured: in as little as may be."""
    now_s, cpu_s = time.monotonic(), time.process_time()
    if len(messages) == 1 and isinstance(messages[0], Interrupts):  # many at once
        found = Counter[tuple[str, int]]({("Interrupt", messages[0].generation): len(messages[0].holders)})
    else:
        found = Counter[tuple[str, int]]((type(one).__name__, getattr(one, "generation", 0)) for one in messages)
    for (kind, generation), number in found.items():
        places = noted.setdefault(kind, {})
        places[generation] = [places.get(generation, [0.0])[0] + number, now_s, cpu_s]


def main() -> int:
    noted: Noted = {}
    run_dir = Path(sys.argv[sys.argv.index("--run-dir") + 1])

    def encoding(message: Any) -> bytes:
        if isinstance(message, OrderFrame):
            note(noted, message.orders)
        return encode(message)

    def decoding(data: bytes) -> Any:
        message = decode_to_orchestrator(data)
        if isinstance(message, EventsFrame):
            note(noted, message.events)
        return message

    def write(_number: int, _frame: FrameType | None) -> None:
        fresh = run_dir / f"{NOTES}.new"
        fresh.write_bytes(msgspec.json.encode(noted))
        os.replace(fresh, run_dir / NOTES)

    vars(agents).update(encode=encoding, decode_to_orchestrator=decoding)
    signal.signal(signal.SIGUSR1, write)
    return entry.main()


if __name__ == "__main__":
    sys.exit(main())
