"""Formulas: rates, losses, intervals, bills. Imports no other room."""
