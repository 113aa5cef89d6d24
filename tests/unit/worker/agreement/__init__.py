"""Tests of `worker.agreement`."""
