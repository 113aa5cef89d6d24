"""Health: who is silent, who hangs, who waits for whom in vain. Imports `model` and `messages`."""
