"""What follows from each kind of event: requests, KV caches, the fleet, measurements, other gateways."""
