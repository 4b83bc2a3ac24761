"""The adapters, tested on the engines' own modules, taken from their distributions."""
