"""Stands for the Mooncake package, which the tests' environment does not have."""
