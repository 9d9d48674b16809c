"""Samplers: which rows a learner gets, and in what form."""
