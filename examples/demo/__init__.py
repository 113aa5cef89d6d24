"""The demonstration behind `make demo`: the same training twice, once in peace and once under faults, bit by bit."""
