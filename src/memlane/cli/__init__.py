"""The command line: one module for each command, and how things are shown."""
