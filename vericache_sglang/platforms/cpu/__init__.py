"""SGLang on a machine without a GPU."""
