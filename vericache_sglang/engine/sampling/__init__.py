"""The next token of every row, drafted, verified or plain, by SGLang's own sampler."""
