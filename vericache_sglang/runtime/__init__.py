"""The speculative worker inside SGLang: executes what the scheduler plans."""
