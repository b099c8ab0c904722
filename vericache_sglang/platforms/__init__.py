"""Out-of-tree SGLang platforms."""
