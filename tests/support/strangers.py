"""What tests of strangers share."""

from __future__ import annotations

USUAL = 1024  # the soft limit that most systems give
