"""The verb that starts a run."""
