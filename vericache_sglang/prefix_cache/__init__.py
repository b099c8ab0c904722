"""Prefix cache on the host and in a store, below SGLang's radix tree."""
