"""The object store: one writer puts keyed objects, N readers get them by address."""
