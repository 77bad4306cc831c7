"""One completion from its prompt to its end: legs, failures, a client that leaves."""
