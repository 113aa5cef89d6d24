"""Scheduling: a worker that holds no rank yet stays out of the way of training. Imports no other room."""
