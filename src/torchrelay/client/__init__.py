"""Client: reaches a run, live or by its journal. Imports `api` and what lies below."""
