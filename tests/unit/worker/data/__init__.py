"""Tests of `worker.data`."""
