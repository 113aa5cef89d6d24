"""What tests of snapshots for real share."""

from __future__ import annotations

EVERY = 10
