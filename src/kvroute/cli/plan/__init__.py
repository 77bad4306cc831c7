"""`kvroute plan`."""
