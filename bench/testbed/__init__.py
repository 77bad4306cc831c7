"""Transfers and policies on a testbed of network namespaces, compared with the model."""
