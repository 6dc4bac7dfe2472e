"""Agents: protocol and fabric put together with ZeroMQ and the workers beside them."""
