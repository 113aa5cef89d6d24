"""Tests of `launcher`."""
