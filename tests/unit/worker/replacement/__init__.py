"""Tests of `worker.replacement`."""
