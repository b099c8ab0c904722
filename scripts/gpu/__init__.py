"""Checks and measurements on a GPU host, in parts that resume."""
