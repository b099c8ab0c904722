"""The paper's figures, recomputed, with explanations of the differences."""
