"""Samplers: which rows a learner gets, and in what form."""

from clusterenv.store.samplers.sampler import Draw

__all__ = ["Draw"]
