"""The `gateway:` section of a cluster file: settings and their checks."""
