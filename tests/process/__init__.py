"""Tests that start processes, wait, or go through many states; no job trains in them."""
