"""Attention backends for CPU and CUDA, and packed draft rows."""
