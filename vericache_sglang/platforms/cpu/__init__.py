"""SGLang platform for machines without a GPU."""
