"""Prefixes kept for later requests, below SGLang's radix tree."""
