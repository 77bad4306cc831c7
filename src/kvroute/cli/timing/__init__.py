"""`kvroute timing`."""
