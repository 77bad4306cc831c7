"""The agent of a server or switch, between the scheduler of all-reduce schemes and the ranks on the server."""
