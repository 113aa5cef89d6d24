"""Model: the state of the cluster and of its jobs, as values. Imports `messages`."""
