"""Lets programs that did not start each other find a queue that one of them serves by name: a Unix
socket in a folder of the user, the *door*, which hands out handles."""
