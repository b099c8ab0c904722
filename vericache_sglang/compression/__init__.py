"""Compressors: choose the prompt tokens of the draft KV and encode the KV."""
