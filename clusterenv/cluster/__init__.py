"""Connects to Dask clusters, starts them, and replaces their lost workers."""
