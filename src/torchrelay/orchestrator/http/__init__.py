"""HTTP: the port, its calls, and who may use it. Imports `core` and the rooms below."""
