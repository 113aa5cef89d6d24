"""Real faults on real processes, for tests and demonstrations. Of its victims it knows only the process ids."""
