"""What faults came to: the ledger of incidents, and figures made of it."""
