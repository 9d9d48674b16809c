"""Spaces, columns, fragments and batches: what both sides share, without Dask."""
