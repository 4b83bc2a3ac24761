"""Adapters on the engines' own modules, taken from their distributions; none of it is kept."""
