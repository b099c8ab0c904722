"""Where every cached segment's parts are, and which of them leaves next."""
