"""Measurements whose results the README shows, each with the command that repeats it."""
