"""The command line, one module a verb. Nothing here is needed by a training process."""
