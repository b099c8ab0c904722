"""Hooks on SGLang, one file for each SGLang module, and what they claim."""
