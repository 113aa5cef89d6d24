"""Violation: what ends a simulated world that has gone wrong."""


class Violation(AssertionError):
    """An invariant does not hold."""
