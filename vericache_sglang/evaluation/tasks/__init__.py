"""The data sets of the paper's evaluation: loaders, synthetic twins, scoring."""
