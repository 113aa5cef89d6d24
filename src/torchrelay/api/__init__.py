"""API: what operators are shown, as types, and where they ask for it. Imports the protocol only."""
