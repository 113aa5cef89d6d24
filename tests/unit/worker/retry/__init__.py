"""Tests of `worker.retry`."""
