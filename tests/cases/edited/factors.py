"""A factor of the loss."""

FACTOR = 1.0
