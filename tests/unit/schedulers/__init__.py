"""Tests of `schedulers`."""
