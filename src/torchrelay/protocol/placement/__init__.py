"""Placement: where ranks may be, and where they may stop. Imports `model` and `messages`."""
