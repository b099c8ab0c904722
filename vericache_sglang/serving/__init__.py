"""The launcher, what it refuses, and the live page."""
