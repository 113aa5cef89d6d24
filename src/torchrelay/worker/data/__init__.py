"""Data: loops and loaders that can be entered in the middle. Imports `state`, `hidden_state` and the rooms below."""
