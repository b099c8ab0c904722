"""Kernels of VeriCache; imports nothing of its rooms."""
