"""The commands: each module holds one command, `app` joins them. They parse, call one room and print."""
