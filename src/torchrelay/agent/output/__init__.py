"""Output: what workers print comes into logs that are bounded. Imports no other room."""
