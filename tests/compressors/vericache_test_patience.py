"""Lets compressors of test servers be slow: a busy machine is slow, not hanging."""


def install():
    """Lift the guard's limit; SGLang's plugin loader calls this in every process."""
    from vericache_sglang.compression import guard

    guard.LONGEST_S = 600.0
