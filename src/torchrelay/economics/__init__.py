"""Economics: what interruptions cost, what a tool against them is worth, and under which assumptions. No torch, no I/O.

Formulas are in `rates`, `loss` and `intervals`; `published` holds other people's figures, worked through with them.
"""
