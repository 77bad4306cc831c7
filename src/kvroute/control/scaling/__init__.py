"""How many instances each model needs."""
