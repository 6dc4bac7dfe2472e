"""The daemons `pdxfer-prefill` and `pdxfer-decode`: an agent in a process of its own."""
