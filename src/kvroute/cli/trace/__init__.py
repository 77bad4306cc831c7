"""`kvroute trace`."""
