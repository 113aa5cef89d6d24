"""Tests of `worker`, a folder for each room."""
