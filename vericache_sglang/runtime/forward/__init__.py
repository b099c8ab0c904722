"""One forward: rows of requests, CUDA graphs, tokens that stay on the device."""
