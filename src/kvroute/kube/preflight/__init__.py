"""Checks of a Kubernetes cluster before a gateway serves it."""
