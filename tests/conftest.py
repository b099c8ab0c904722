"""One OpenMP thread: a second one spins at every barrier on a busy small machine."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
