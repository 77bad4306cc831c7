"""Published evaluations as data: set-up, sweep, expected direction."""
