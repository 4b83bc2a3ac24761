"""The README's commands in places that strangers have: `make fresh`, before every release."""
