"""Tiers on servers and on other processes' files: what they share, and one file for each."""
