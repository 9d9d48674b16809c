"""Spaces, columns, fragments and batches: shared by head and workers, without Dask."""
