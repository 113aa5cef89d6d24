"""Hardware: the accelerator of this rank, and the processor time of a worker that holds none. Imports no other room."""
