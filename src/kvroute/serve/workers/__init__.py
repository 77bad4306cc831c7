"""Several gateway processes on one port of one machine, and the process that starts and supervises them."""
