"""Reading and writing files beyond what kvroute_engine has: compressed lines, JSON schemas."""
