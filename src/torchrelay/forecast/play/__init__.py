"""Play: a job is played through its time. Imports `inputs`."""
