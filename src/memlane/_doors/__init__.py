"""How programs that did not start each other find what one of them serves under a name: a Unix
socket in a folder of the user, the *door*, which hands out handles."""
