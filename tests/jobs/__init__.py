"""Tests of whole jobs of real processes, and of faults in them."""
