"""Drafters and verifiers in different processes: messages, protocol and transport."""
