"""Tests of `worker.bootstrap`."""
