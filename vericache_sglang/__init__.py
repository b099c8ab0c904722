"""SGLang serving that drafts on a compressed KV cache and answers as the full one."""
