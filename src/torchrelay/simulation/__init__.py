"""The protocol core in a seeded world: `python -m torchrelay.simulation --seeds 10000`."""
