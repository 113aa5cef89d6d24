"""State: what a rank is made of. Imports `hidden_state`, `tensors` and the rooms below."""
