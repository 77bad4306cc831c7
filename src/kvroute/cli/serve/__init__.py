"""`kvroute serve` and `kvroute epp`."""
