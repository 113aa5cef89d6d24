"""Judge: what must always be true. Imports `scene` and what lies below."""
