"""The API server: requests, watches and objects."""
