"""Segments of prompts that outlive a server: named, sealed, kept in a store."""
