"""Tests of `worker.state`."""
