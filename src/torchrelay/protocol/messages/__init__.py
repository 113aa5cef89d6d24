"""Messages: names, events that are heard, orders that are said. Imports no other room."""
