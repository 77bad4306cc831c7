"""Connections to engines: a pool, calls, and regular polls."""
