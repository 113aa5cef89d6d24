"""Messages: how parts of torchrelay talk to one another. Imports no other room."""
