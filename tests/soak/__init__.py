"""Tests that take minutes: `make soak`."""
