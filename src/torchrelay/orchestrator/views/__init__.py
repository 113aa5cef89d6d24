"""Views: the state as operators see it, and why it is so. Imports `store`."""
