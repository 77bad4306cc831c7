"""The thread that forwards streams from engines to clients."""
