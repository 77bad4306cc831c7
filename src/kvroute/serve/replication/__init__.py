"""Shares bookings and knowledge with the other gateways of the cluster through a Redis stream."""
