"""The command `kvroute-engine`. Its commands are declared as data, and `kvroute` offers them as its own, too."""
