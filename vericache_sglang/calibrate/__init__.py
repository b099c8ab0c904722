"""Offline measurements on a model: the best split of its KV, tables for the codecs."""
