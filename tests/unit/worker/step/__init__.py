"""Tests of `worker.step`."""
