"""Processes that the demo and the bench start, talk to and always end."""
