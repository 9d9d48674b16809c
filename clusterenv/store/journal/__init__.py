"""Rows of a replay store on disk."""
