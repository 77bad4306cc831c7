"""`kvroute simulate`."""
