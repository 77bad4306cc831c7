"""Connections of clients: reading requests, writing responses, limits."""
