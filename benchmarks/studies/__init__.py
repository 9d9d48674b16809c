"""Experiments that compare learners and settings; docs/experiments/ shows their results."""
