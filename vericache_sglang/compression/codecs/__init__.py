"""Codecs: encode KV into a smaller draft KV and the residual that restores it."""
