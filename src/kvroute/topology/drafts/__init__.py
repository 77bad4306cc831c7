"""Cluster files that are made: by template, from discovered engines, from node labels."""
