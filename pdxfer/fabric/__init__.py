"""Lanes: how bytes travel."""
