"""Verbs that compute what faults cost."""
