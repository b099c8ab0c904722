"""The next token of every row, drafted or verified, by SGLang's own sampler."""
