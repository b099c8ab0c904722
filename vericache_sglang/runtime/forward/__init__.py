"""Builds and runs one forward: rows, CUDA graphs and tokens kept on the device."""
