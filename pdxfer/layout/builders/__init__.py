"""Builders: layouts of the caches that engines have, from their shapes."""
