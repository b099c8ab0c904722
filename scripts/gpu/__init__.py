"""Checks and measurements on a GPU host, in parts that can be interrupted."""
