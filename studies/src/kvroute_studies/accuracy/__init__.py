"""Predictions of the simulator's engine beside measured runs of vLLM."""
