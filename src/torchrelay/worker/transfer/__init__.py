"""Transfer: state moves from worker to worker. Imports `state`, `tensors` and the rooms below."""
