"""A Python that has done the slow imports, and forks for each command that it is told: a rank then starts in a second.

`python warm_python.py torchrun` reads commands as lines of JSON, and answers with the process id of each and, later,
its exit status. A command is forked here. If it replaces itself by torchrun, it stays that process, and the ranks that
torchrun starts are forked from it: so processes have the parents, the signals and the sockets that they really have.
The kit's own modules are not imported beforehand: each process imports them anew.
"""

import importlib
import json
import os
import runpy
import select
import signal
import sys
import time
import traceback
from contextlib import suppress

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the scripts set it before they import torch
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as the launcher does
_IMPORTS = "torch torch.distributed.run transformers accelerate accelerate.commands.launch peft.tuners.lora datasets"
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGCHLD)


class Forked:
    """What torchrun uses of `subprocess.Popen`, for a process that was forked."""

    def __init__(self, words, env, first):
        self.args, self.returncode = words, None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            become(words, env, first)

    def poll(self):
        with suppress(ChildProcessError):
            if self.returncode is None and (found := os.waitpid(self.pid, os.WNOHANG))[0]:
                self.returncode = os.waitstatus_to_exitcode(found[1])
        return self.returncode

    def wait(self, timeout):
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise TimeoutError
            time.sleep(0.05)
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)


def become(words, env, first):
    """In a forked process: be what ``words``, a command of Python, would be. Never returns."""
    status = 1
    try:
        first()
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ.update(env)
        run(words, env)
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def run(words, env):
    """Run a command of Python in this process, in the place of what ran here before."""
    for name in [name for name in sys.modules if name == "kit" or name.startswith("kit.")]:
        del sys.modules[name]
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    os.execve = lambda path, words, env: replace(words, env)
    os.sched_getaffinity = lambda _: {0}  # one thread a rank: several hosts share the cores of this machine
    subprocess_handler.SubprocessHandler._popen = lambda self, words, env: Forked(words, env, into_own_session)
    words = [word for word in words[1:] if word != "-u"]
    sys.path[:] = [path for path in [*env.get("PYTHONPATH", "").split(":"), *sys.path] if path]
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
        runpy.run_path(words[0], run_name="__main__")


def replace(words, env):
    os.environ.clear()
    os.environ.update(env)
    run(words, env)
    raise SystemExit(0)


def into_own_session():
    os.setsid()
    os.closerange(3, 4096)  # sockets of the launcher, which must close when it ends


def serve():
    for name in _IMPORTS.split():
        importlib.import_module(name)
    print(json.dumps({"ready": os.getpid()}), flush=True)
    started, pending = {}, b""
    while True:
        if select.select([0], [], [], 0.05)[0]:
            if not (read := os.read(0, 1 << 16)):
                os._exit(0)
            *lines, pending = (pending + read).split(b"\n")
            for line in lines:
                command = json.loads(line)

                def first(command=command):
                    os.setsid()
                    log = os.open(command["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                    null = os.open(os.devnull, os.O_RDONLY)
                    for number, file in enumerate((null, log, log)):
                        os.dup2(file, number)
                    os.closerange(3, 4096)
                    os.chdir(command["cwd"])

                started[command["number"]] = Forked(command["words"], command["env"], first)
                print(json.dumps({"number": command["number"], "pid": started[command["number"]].pid}), flush=True)
        for number, one in list(started.items()):
            if one.poll() is not None:
                print(json.dumps({"number": number, "status": one.returncode}), flush=True)
                del started[number]


if __name__ == "__main__":
    serve()
