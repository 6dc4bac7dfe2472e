"""All that a worker and the agent beside it share: the Unix socket, and the status board."""
