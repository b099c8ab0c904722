"""Cached segments that outlive a server: named, sealed, in a storage backend."""
