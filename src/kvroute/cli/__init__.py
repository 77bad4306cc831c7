"""The commands. Each module is one command: it parses options, calls one package and prints. `app` joins them."""
