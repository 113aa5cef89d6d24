"""What tests of inside moves share."""

from __future__ import annotations

from tests.support.acts import Inside

# Everybody and everything once, each phase at least once.
FIRST = [
    Inside("target", "restore"),
    Inside("source", "catching up"),
    Inside("untaint", "halt heard"),
    Inside("bystander", "standing"),
    Inside("freeze", "rehearsing"),
    Inside("orchestrator", "resume"),
    Inside("second", "joining"),
    Inside("source's agent", "standing"),
    Inside("target's agent", "reconfigure"),
]
