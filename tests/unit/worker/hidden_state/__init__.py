"""Tests of `worker.hidden_state`."""
