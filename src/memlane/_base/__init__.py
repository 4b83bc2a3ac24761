"""What all systems share and none owns. Each file opens with what may live in it."""
