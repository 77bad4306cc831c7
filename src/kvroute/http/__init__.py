"""HTTP/1.1 server and upstream connections. Nothing here depends on LLMs or on routing."""
