"""From the text of a cluster file to a cluster: expansion of shorthands, locations, checks, links."""
