"""The protocol between agents: messages, their encoding, page ids, version. Pure; no sockets."""
