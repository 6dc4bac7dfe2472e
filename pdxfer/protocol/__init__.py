"""State tables and machines of a transfer, sans I/O: time is an argument."""
