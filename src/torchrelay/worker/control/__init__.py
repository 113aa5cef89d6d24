"""Control: the control thread, and what it shares with the main thread. Imports `hardware`."""
