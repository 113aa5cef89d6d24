"""Scheduler plugins behind one port: whoever owns the nodes. Here: one machine; Slurm and Kubernetes come later."""
