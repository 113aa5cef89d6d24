"""Tests of `worker.peers`."""
