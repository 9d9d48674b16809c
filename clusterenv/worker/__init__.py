"""The Dask actor and its threads; runs on workers."""
