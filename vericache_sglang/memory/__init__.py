"""Where KV bytes are and who holds them."""
