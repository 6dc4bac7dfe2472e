"""The commands: `pdxfer`, `pdxfer-prefill`, `pdxfer-decode`."""
