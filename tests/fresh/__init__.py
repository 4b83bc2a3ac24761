"""The README's commands in environments that users have: `make fresh`, before every release."""
