"""One request: endpoints, admission, and its prefill, decode and prefix-copy legs."""
