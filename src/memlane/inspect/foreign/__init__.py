"""Files in /dev/shm that are not memlane's: engines' own rings, and what engines left behind."""
