"""The offload region against what one would write without it, in one run."""
