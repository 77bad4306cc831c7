"""Endpoint picker for Envoy: an ext_proc v3 server on the core, engine clients and requests of the gateway."""
