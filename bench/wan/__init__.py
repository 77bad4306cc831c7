"""Measurements of the KV connector over a wide-area link of network namespaces."""
