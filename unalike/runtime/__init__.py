"""Runtimes deliver a request to clients and stream their replies back; nothing else knows where clients live."""
