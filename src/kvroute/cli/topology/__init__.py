"""`kvroute topology`."""
