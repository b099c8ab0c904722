"""Samples the next tokens of drafted and verified rows with SGLang's sampler."""
