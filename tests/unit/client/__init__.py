"""Tests of `client`."""
