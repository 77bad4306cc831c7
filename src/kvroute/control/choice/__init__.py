"""Choosing instances for a request, with the forecasts, loads and store reads that a choice counts."""
