"""Engines found as pods: their addresses, roles, models and places."""
