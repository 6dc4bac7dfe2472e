"""The control channel between agents: ZeroMQ with CURVE under numbered sessions.

A prefill agent has one `ControlServer`; a decode agent has one `ControlLink` for each prefill
address, kept by `Links`.
"""
