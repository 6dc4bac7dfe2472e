"""`pdxfer plan`: two instances, and how the cache of one is written into the other."""

from __future__ import annotations

from pdxfer.cli.plan.command import add_arguments, run

__all__ = ["add_arguments", "run"]
