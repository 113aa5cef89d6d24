"""Tests of `netpath`."""
