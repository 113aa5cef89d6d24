"""Store: the journal, and the state that is read back from it. Imports no other room."""
