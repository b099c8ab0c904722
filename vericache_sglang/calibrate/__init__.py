"""Offline calibration on a model: the best bit planes of its KV, tables of codecs."""
