"""Platforms that SGLang does not have itself."""
