"""Published evaluations as data: set-up, sweep and expected direction."""
