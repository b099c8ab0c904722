"""Hooks on SGLang, one file per hooked module, with their patch records."""
