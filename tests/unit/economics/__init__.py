"""Tests of `economics`."""
