"""Persistent cached segments in a storage backend, named by content and sealed."""
