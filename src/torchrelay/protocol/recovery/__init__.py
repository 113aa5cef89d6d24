"""Recovery: from a loss to the resumed step. Imports `placement` and the rooms below."""
