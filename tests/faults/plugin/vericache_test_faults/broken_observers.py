"""Every sink and the report raise, from some moment on."""


def install():
    """Break what observes; drafting and verifying stay as they are."""
    from vericache_sglang.observability.prometheus import Metrics
    from vericache_sglang.observability.trace import Trace
    from vericache_sglang.scheduling.runtime import Runtime

    seen = []

    def iteration(self, record):
        seen.append(record)
        raise ValueError(f"broken {type(self).__name__}")

    figures = Runtime.figures

    def breaks_later(self):
        if seen:  # until then the metrics read it
            raise ValueError("broken report")
        return figures(self)

    Metrics.iteration = Trace.iteration = iteration
    Runtime.figures = breaks_later
