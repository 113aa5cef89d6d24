"""Transport: messages between ranks over several paths. Imports `native`."""
