"""Hidden state: what the script keeps outside what it gave. Imports `tensors` and the rooms below."""
