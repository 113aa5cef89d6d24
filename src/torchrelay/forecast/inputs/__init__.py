"""Inputs: faults, traces, layouts, phases, and the settings made of them. Imports no other room."""
