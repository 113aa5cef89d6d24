"""What tests of outputs share."""

from __future__ import annotations

LINE = b"a line of output\n"
