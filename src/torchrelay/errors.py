"""The errors of torchrelay: what it refuses, and what it found to be wrong. Each message ends with a remedy."""

from __future__ import annotations


class TorchrelayError(Exception):
    """Base class of all errors raised by torchrelay."""


class RefusedError(TorchrelayError):
    """torchrelay cannot protect this script as it is.

    reason   what stands in the way, naming the object
    remedy   what to change
    """

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"{reason}. {remedy[:1].upper()}{remedy[1:]}")
        self.reason = reason
        self.remedy = remedy

    def __reduce__(self) -> tuple[type[RefusedError], tuple[str, str]]:
        return type(self), (self.reason, self.remedy)


class StateMismatchError(TorchrelayError):
    """State that arrived, or another rank's, does not fit what this script has built. Names the tensor or value."""


class UndeclaredError(TorchrelayError):
    """A collective outside every step and section was cut by a fault, or would have to be run by one rank alone.

    The job falls back to the script's own checkpoint.
    """


class UnprovedError(TorchrelayError):
    """A replacement's or a repeated step's data, numbers or code could not be verified against the first ones.

    Nothing is trained on it: the job falls back to the script's own checkpoint.
    """


class StepInterrupted(BaseException):
    """Unwinds a step or section that a fault has cut short; it is then called again. Not for scripts to catch."""


def with_article(name: str) -> str:
    """The name with its article, as it is spoken: an AdamW, an SGD, a Linear."""
    spelt = name[:2].isupper() and name[:1] in "AEFHILMNORSX"
    return f"{'an' if spelt or name[:1].upper() in 'AEIO' else 'a'} {name}"
