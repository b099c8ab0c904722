"""How KV is stored smaller: a draft part, and the residual that restores every bit."""
