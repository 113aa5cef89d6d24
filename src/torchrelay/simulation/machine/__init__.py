"""Machine: simulated nodes, their network, the orchestrator's shell. Imports `worker` and the rooms below."""
