"""Choices of read paths from the store (DualPath)."""
