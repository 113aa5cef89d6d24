"""Tests of `worker.source`."""
