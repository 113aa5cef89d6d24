"""What tests of groups share."""

from __future__ import annotations

import pytest

from torchrelay.worker.process_groups import groups

EMPTY_CACHE = {"TORCHRELAY_CACHE": "/nonexistent"}


@pytest.fixture(scope="session")
def extension() -> dict[str, str]:
    """The environment in which the extension is found; compiled if it was not yet."""
    try:
        path = groups.build_extension()
    except RuntimeError as error:
        pytest.skip(f"no extension: {error}")
    return {"TORCHRELAY_CACHE": str(path.parent)}
