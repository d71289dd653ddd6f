"""The launcher that ``kit.strategy.launch`` starts: torchrun, without its own words where a rank has said why it ended.

Run as a script, with the arguments of torchrun. Restarts, signals and everything else are torchrun's own.

Promises: the exit status is that of the rank that failed first (128 + N if signal N killed it), or the one that the
ranks ended with after a signal. A rank that was killed is named, because it could not print anything.
"""

import logging
import os
import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # not this folder: its modules would hide others

from kit.strategy.launcher import ACCELERATE_PID, OWN_TORCHRUN, end_under, end_with_launcher


def main(argv: list[str]) -> int:
    """Start the ranks, wait for them, and return the exit status."""
    if os.environ.get(ACCELERATE_PID, str(os.getppid())) != str(os.getppid()):
        return 128 + signal.SIGTERM  # `accelerate launch` ended before it could be watched from here
    end_with_launcher()
    os.environ[OWN_TORCHRUN] = "1"
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if "LOGLEVEL" not in os.environ:  # by which users of torchrun ask for its log
        for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic.")]:
            logging.getLogger(name).setLevel(logging.ERROR)
            logging.getLogger(name).addFilter(lambda record: not str(record.msg).startswith("failed (exitcode"))
    try:
        run.run(run.parse_args(argv))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()  # torchrun ended the others
        if failure.exitcode >= 0:
            return failure.exitcode
        cause = ", as Linux does when memory runs out" if failure.exitcode == -signal.SIGKILL else ""
        print(f"\nerror: rank {rank} was killed by {failure.signal_name()}{cause}", file=sys.stderr)
        return 128 - failure.exitcode
    except SignalException as error:
        status = end_under(os.getpid())
        return 128 + error.sigval if status is None else status
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
