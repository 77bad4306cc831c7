"""Copies of cached prefixes between instances."""
