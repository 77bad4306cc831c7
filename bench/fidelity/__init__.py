"""Predictions of the simulator beside measurements: of real engines, and published ones."""
