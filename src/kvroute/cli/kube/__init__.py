"""`kvroute kube`."""
