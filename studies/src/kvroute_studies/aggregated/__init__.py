"""The default policy against pairs only and aggregated serving, on many networks."""
