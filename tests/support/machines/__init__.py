"""Machines: several machines on one, for tests of jobs over more than one.

Each has its own network, mounts, processes, host name and shared memory: nothing is shared but what is installed.
"""
