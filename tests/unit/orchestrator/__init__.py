"""Tests of `orchestrator`."""
