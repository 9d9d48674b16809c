"""Shards: where they are placed, what state they are in, and how they are restarted."""
