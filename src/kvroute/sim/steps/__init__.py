"""Steps of a request in virtual time: prefill, decode, and the wait for a prefix."""
