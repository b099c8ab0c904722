"""``GET /vericache``: what every request does now, as a page rendered on the server."""
