"""PrfaaS's throughput plan: instances, offloading, bandwidth."""
