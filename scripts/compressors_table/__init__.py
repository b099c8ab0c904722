"""The table of compressors: every line served, measured and compared with full KV."""
