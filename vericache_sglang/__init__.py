"""Lossless SGLang serving: drafts on a compressed KV cache, verifies on the full KV."""
