"""`torchrelay agent --join HOST:PORT --token-file F`: this machine becomes a node of a job that runs elsewhere."""

from __future__ import annotations


def run(words: list[str]) -> int:
    """Join, serve, and end with the job. Returns the exit code."""
    from torchrelay.agent.__main__ import join  # imports a web client: not for the help of other verbs

    return join(words)
