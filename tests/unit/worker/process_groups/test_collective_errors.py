"""Errors of broken communication are told from those of the script."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from torchrelay.worker.process_groups.abandon import Abandoned
from torchrelay.worker.process_groups.groups import is_collective_error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[/src/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"),
        RuntimeError("[/src/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 2000ms for recv"),
        RuntimeError("Rank 1 successfully reached monitoredBarrier, but received errors"),
        RuntimeError("No backend type associated with device type cpu"),
        dist.DistNetworkError("Broken pipe"),
        dist.DistStoreError("wait timeout after 1000ms, keys: /nokey"),
        Abandoned("connecting a new group was interrupted"),
    ],
)
def test_errors_of_communication_are_known(error: BaseException) -> None:
    assert is_collective_error(error)
    assert is_collective_error(raised_from(error, explicit=True))
    assert is_collective_error(raised_from(error, explicit=False))


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA out of memory"), ValueError("gloo/transport"), KeyboardInterrupt(), OSError("Broken")]
)
def test_errors_of_the_script_are_not(error: BaseException) -> None:
    assert not is_collective_error(error)
    assert not is_collective_error(raised_from(error, explicit=True))


def raised_from(cause: BaseException, *, explicit: bool) -> BaseException:
    try:
        try:
            raise cause
        except BaseException as error:
            if explicit:
                raise ValueError("while training") from error
            raise ValueError("while training")  # noqa: B904  that is the case under test
    except ValueError as error:
        return error


def test_an_error_hidden_by_from_none_is_found_too_for_the_step_is_redone_all_the_same() -> None:
    error = raised_from(dist.DistNetworkError("Broken pipe"), explicit=False)
    error.__suppress_context__ = True
    assert is_collective_error(error)
