"""Which orchestrator acts, and which takes its place when its node is lost."""
