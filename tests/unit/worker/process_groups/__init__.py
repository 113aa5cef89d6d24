"""Tests of `worker.process_groups`."""
