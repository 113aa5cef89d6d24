"""Slurm: the scheduler port by Slurm's command line, from 22.05 on, with an ordinary user's rights."""
