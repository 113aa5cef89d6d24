"""Launcher: the process behind `torchrelay run`. Imports `client` and what lies below."""
