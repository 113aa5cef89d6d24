"""Parallel: wrappers of torch and other libraries, put right after a fault. Imports no other room."""
