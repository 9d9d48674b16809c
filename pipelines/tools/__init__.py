"""The other commands of the command line."""
