"""Instances that follow a day's load against a fixed number of them."""
