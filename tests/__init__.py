"""Tests of torchrelay: pure ones, of processes, of real training, and of the tests themselves."""
