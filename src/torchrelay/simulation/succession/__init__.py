"""Heads, heirs and voters in a seeded world: `python -m torchrelay.simulation.succession --seeds 10000`."""
