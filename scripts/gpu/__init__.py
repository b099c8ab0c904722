"""One command for a host with a CUDA device and no network: ``python run.py``."""
