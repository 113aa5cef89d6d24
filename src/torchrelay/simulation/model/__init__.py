"""Model: values of a simulated world. Imports no other room."""
