"""Token-by-token comparison of VeriCache with plain SGLang, over many settings."""
