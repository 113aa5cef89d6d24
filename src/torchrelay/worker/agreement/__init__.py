"""Agreement: what all ranks tell one another in gates and at protect(). Imports `session` and the rooms below."""
