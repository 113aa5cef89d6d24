"""Tests of `forecast`."""
