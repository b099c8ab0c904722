"""The parts: a module each, with ``checks``."""
