"""Other users of the machine, who reach the ports of ranks and know no secret."""

from __future__ import annotations

import resource

import pytest

from tests.support.strangers import USUAL
from torchrelay.wire.files.descriptors import ENOUGH, allow_many
from torchrelay.wire.trust.trust import keys_of


def test_the_soft_limit_is_raised_as_far_as_is_sensible(monkeypatch: pytest.MonkeyPatch) -> None:
    infinite = resource.RLIM_INFINITY
    for soft, hard, wanted in (
        (USUAL, 20_000, 20_000),
        (USUAL, 1 << 30, ENOUGH),
        (USUAL, infinite, ENOUGH),
        (1 << 20, 1 << 20, 1 << 20),
        (infinite, infinite, infinite),
    ):
        limits = [(soft, hard)]
        monkeypatch.setattr(resource, "getrlimit", lambda _, now=limits: now[-1])
        monkeypatch.setattr(resource, "setrlimit", lambda _, new, now=limits: now.append(new))
        assert allow_many() == wanted
        assert limits[-1] == (wanted, hard)

    def refuse(*_: object) -> None:
        raise ValueError("not permitted")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (USUAL, 4096))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert allow_many() == USUAL


def test_keys_in_the_store_are_of_one_job_and_one_generation() -> None:
    secret, another = bytes(32), bytes([1] * 32)
    assert keys_of(secret, 2) == keys_of(secret, 2)
    assert len({keys_of(secret, 1), keys_of(secret, 2), keys_of(another, 1), keys_of(another, 2)}) == 4
