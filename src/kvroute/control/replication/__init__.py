"""What several gateways in front of one cluster tell each other."""
