"""Pools, tiers and the chain, on real disks and servers."""
