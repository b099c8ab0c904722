"""Which prompt tokens the draft part keeps; pure functions of tensors."""
