"""The orchestrator of the scale bench: the real one, which also notes when it sent and heard what.

What players see of an order comes later than it was sent: they are busy with thousands of others on the same cores.
SIGUSR1 writes down what was noted.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from torchrelay.orchestrator import __main__ as entry
from torchrelay.orchestrator.core import agents
from torchrelay.wire.messages.channel import OrderFrame
from torchrelay.wire.messages.codec import encode

NOTES = "noted.json"
Noted = dict[str, dict[int, list[float]]]  # a kind -> a generation -> how many, when the last one, CPU seconds then


def note(noted: Noted, message: Any) -> None:
    """One order that goes out, or one event that came in."""
    places = noted.setdefault(type(message).__name__, {})
    known = places.get(getattr(message, "generation", 0), [0.0])
    places[getattr(message, "generation", 0)] = [known[0] + 1, time.monotonic(), time.process_time()]


def main() -> int:
    noted: Noted = {}
    run_dir = Path(sys.argv[sys.argv.index("--run-dir") + 1])
    hear_agent = agents.hear_agent

    def encoding(message: Any) -> bytes:
        if isinstance(message, OrderFrame):
            for order in message.orders:
                note(noted, order)
        return encode(message)

    def hearing(connection: Any, service: Any, frame: Any, late_ms: int) -> None:
        note(noted, frame.event)
        hear_agent(connection, service, frame, late_ms)

    def write(_number: int, _frame: FrameType | None) -> None:
        fresh = run_dir / f"{NOTES}.new"
        fresh.write_bytes(msgspec.json.encode(noted))
        os.replace(fresh, run_dir / NOTES)

    vars(agents).update(encode=encoding, hear_agent=hearing)
    signal.signal(signal.SIGUSR1, write)
    return entry.main()


if __name__ == "__main__":
    sys.exit(main())
