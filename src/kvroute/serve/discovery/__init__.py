"""Sources of discovered engines that need no other system than a file or a DNS server."""
