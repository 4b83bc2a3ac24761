"""Checks of the manual that need no Sphinx; `make docs` builds it and checks the result."""
