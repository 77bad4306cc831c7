"""One emulated engine: batch, sequences, caches."""
