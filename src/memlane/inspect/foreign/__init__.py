"""What is in /dev/shm that is not memlane's: engines' own rings, and files that they left."""
