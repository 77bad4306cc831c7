"""Results to tables, plots, JSON and one HTML page."""
