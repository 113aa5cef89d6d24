"""Agreement: what all ranks tell one another in gates and at join(). Imports `session` and the rooms below."""
