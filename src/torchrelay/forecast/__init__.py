"""Forecast: a simulator of a cluster over months, that says what faults will cost under each way of getting over them."""
