"""A tiny Llama that answers JSON tool calls from records in a long prompt."""
