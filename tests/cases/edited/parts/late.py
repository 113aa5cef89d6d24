"""A factor of the loss, in a module that is imported late."""

FACTOR = 1.0
