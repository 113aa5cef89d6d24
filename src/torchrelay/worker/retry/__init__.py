"""Retry: a step that was cut short is run again from the same values. Imports `state` and the rooms below."""
