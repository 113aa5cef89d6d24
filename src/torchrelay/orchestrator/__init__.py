"""The orchestrator: a thin shell (journal, clock, agents, API) around the protocol core. The only one that decides."""
