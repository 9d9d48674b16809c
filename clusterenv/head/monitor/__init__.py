"""Statistics of a collector, and its page on Dask's dashboard."""
