"""What operators touch: the launcher and what it refuses."""
