"""Tests of `worker.control`."""
