"""Peers: what ranks keep for one another, and their connections. Imports `transfer` and the rooms below."""
