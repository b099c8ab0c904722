"""Kernels of VeriCache; independent of its other packages."""
