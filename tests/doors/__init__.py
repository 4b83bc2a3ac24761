"""Programs that did not start each other, and meet by a name."""
