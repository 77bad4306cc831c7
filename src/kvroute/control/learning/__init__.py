"""What the core learns from what has finished."""
