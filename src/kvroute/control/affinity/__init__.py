"""Which instances have served a session, and which adapters each has loaded."""
