"""Tests of `worker.parallel`."""
