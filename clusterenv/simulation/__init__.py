"""Environments and a policy that fill fragments; runs on workers, without Dask."""
