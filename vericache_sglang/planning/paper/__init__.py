"""The paper's own figures, recomputed: what agrees, what does not, and why."""
