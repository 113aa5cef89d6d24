"""Collectives: made of messages. Imports `transport`."""
