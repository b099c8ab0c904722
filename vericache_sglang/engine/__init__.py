"""Does what the plan says, inside SGLang's speculative worker."""
