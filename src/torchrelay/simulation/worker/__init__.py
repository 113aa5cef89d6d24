"""Worker: simulated workers and what they train. Imports `ports` and `model`."""
