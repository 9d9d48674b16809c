"""The rows of a replay store, in memory or in memory-mapped files."""
