"""Forecast: a simulator of a cluster over months: what faults will cost under each way of getting over them."""
