"""Tests of `wire`."""
