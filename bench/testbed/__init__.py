"""Transfers and policies on a testbed of network namespaces, beside what the model says of them."""
