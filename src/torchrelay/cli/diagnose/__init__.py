"""Verbs that examine, and that break on purpose."""
