"""DualPath's evaluation."""
