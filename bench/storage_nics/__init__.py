"""A store behind storage NICs of limited bandwidth, in network namespaces, for buffer servers and engines."""
