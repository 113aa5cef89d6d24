"""Native: the network core and how Python reaches it. Imports no other room."""
