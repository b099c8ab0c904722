"""Simulation of a server on a modelled machine; every figure it gives is SIMULATED."""
