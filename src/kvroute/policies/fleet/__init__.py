"""Choices about the fleet: throughput, replicas, role switches, offloading."""
