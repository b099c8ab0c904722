"""Every sink and the report raise, from some moment on."""


def install():
    """Break what observes; drafting and verifying stay as they are."""
    from vericache_sglang.observability.prometheus import Metrics
    from vericache_sglang.observability.trace import Trace
    from vericache_sglang.scheduling.runtime import Runtime

    def iteration(self, record):
        raise ValueError(f"broken {type(self).__name__}")

    figures = Runtime.figures
    reads = []

    def breaks_later(self):
        reads.append(1)
        if len(reads) > 2:  # boot reads it twice, for the metrics
            raise ValueError("broken report")
        return figures(self)

    Metrics.iteration = Trace.iteration = iteration
    Runtime.figures = breaks_later
