"""Core: events in, journal, orders out. Imports `views` and `store`."""
