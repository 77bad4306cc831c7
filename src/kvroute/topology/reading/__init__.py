"""From the text of a cluster file to a cluster: expansion of shorthands, checks, assembly."""
