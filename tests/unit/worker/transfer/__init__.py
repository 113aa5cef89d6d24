"""Tests of `worker.tensors`."""
