"""The launcher, its refusal tables, request checks and the live page."""
