"""DualPath's plan: bandwidth of storage and networks."""
