"""Tests of `worker.hardware`."""
