"""Tiers and pools: rates of a disk tier beside others, and what policies hit over capacity."""
