"""Replacement: a worker takes over the place of a rank. Imports `agreement` and the rooms below."""
