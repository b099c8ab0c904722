"""What compressing costs: timers inside a server, and their sums by request."""
