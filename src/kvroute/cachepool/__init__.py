"""Where KV caches are kept outside the engines."""
