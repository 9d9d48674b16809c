"""Connections between the head and the shards, and the messages on them; without Dask."""
