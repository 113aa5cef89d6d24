"""Published: other people's figures, worked through. Imports `formulas`."""
