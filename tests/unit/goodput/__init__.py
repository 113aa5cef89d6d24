"""Tests of `goodput`."""
