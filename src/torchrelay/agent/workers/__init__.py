"""Workers: processes of workers are forked, watched and ended. Imports `output`."""
