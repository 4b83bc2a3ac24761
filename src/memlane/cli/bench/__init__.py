"""Measures a queue beside what one would take instead: peers take turns in one run."""
