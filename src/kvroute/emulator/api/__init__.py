"""The HTTP API of an emulated engine."""
