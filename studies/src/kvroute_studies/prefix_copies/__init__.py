"""Copies of cached prefixes ahead of demand, and on demand."""
