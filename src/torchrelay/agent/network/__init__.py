"""Network: what the paths and ports of a node tell becomes taints. Imports `workers`."""
