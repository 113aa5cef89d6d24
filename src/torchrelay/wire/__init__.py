"""What the processes share to talk: codec, framing, trust, and the shared page of a worker."""
