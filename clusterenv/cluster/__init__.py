"""Clusters: connecting to them, starting them, and keeping their workers."""
