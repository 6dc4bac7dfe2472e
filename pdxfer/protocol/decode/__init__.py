"""The decode machine: binds receives to prefill workers, commits them and fences them."""
