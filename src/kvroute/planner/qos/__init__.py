"""Traffic classes of a network that carries KV transfers."""
