"""Rows on disk: Arrow files, a manifest, and commits."""
