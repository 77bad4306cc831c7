"""The legs of a request: to the prefill instance, to the decode instance, to the store."""
