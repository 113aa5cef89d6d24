"""Step: a call from its entry to its commit. Imports `replacement` and the rooms below."""
