"""Reload, state carried over a reload, and role switches."""
