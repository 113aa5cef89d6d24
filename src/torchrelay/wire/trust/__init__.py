"""Trust: tokens and secrets. Imports no other room."""
