"""What strangers meet on machines and terminals unlike ours, played for real."""
