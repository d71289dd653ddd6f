"""How long a thread has waited: for a message of another rank, if it computes a step on the CPU.

Promises: nothing is slowed down or synchronised; a busy machine is not taken for a slow network, because time in which
the thread could run, but got no core, does not count. What the operating system does not count is None.
"""

import time


def waited_seconds(thread: int | None = None) -> float | None:
    """Return how long a thread has waited since an arbitrary moment, so that differences count. None if unknown.

    Args:
        thread: its native id; None: the thread that asks.
    """
    name = "thread-self" if thread is None else f"self/task/{thread}"
    try:
        with open(f"/proc/{name}/schedstat", encoding="ascii") as file:  # nanoseconds: on a core, in wait for a core
            computed, delayed, _ = map(int, file.read().split())
    except (OSError, ValueError):  # not Linux, or a kernel without these counts
        return None
    return time.perf_counter() - (computed + delayed) / 1e9
