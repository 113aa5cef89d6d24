"""Process groups: communicators are made, counted, broken and replaced. Imports no other room."""
