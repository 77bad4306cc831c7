"""The connector's path before kvroute-engine became a distribution; it is valid for this version."""
