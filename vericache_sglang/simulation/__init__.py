"""A server played on a modelled machine; every figure it gives is SIMULATED."""
