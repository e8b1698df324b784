"""Runs `swift` and `python` command lines without the time of their imports: `multiprocessing`'s
fork server imports torch, transformers, vLLM and ms-swift once (`preloaded.py`), and forks.

A forked command line has its own session, environment, working directory, output and exit status.
Processes that it spawns are forked from a process without plugins; torchrun forks its ranks. Five
things differ from the real one: `/proc/PID/environ` and `/proc/PID/cmdline` are the zygote's; hash
seeds are the same in all processes; imports do not read the environment; no destructor runs at the
end; and nothing is compiled without `--torch_compile`. `tests/extra/test_launch.py` and the demo
start real processes.
"""

import atexit
import multiprocessing
import os
import runpy
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[2]
OF_PYTEST = ("", str(ROOT), str(ROOT / "scripts"), str(ROOT / "examples/digits"))
"""Entries that pytest adds to the beginning of `sys.path`."""


def fork(argv: Sequence[str], env: Mapping[str, str], out: Path, err: Path) -> BaseProcess:
    """Start `argv` in the folder of the clone, with its outputs in these two files."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.rig.preloaded"])
    with patch.dict(os.environ, OMP_NUM_THREADS="1"):  # read at import
        forkserver.ensure_running()
    args = (list(map(str, argv)), dict(env), str(out), str(err))
    process = context.Process(target=become, args=args)
    process.start()
    return process


def become(argv: list[str], env: Mapping[str, str], out: str, err: str) -> None:
    """Run a command line in this forked process: as `swift`, torchrun or Python. Other programs
    take its place."""
    import torch._dynamo.config

    from tests.rig import preloaded

    os.setsid()
    os.chdir(ROOT)
    for target, file in enumerate((os.devnull, out, err)):
        source = os.open(file, os.O_APPEND | (os.O_WRONLY if target else os.O_RDONLY))
        os.dup2(source, target)
        os.close(source)
    if Path(argv[0]).name != "swift" and argv[0] != sys.executable:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # as in a terminal
        os.execvpe(argv[0], argv, dict(env))
    os.environ.clear()
    os.environ.update({**preloaded.ENVIRONMENT, **env})
    while sys.path[0] in OF_PYTEST:
        del sys.path[0]
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    # vLLM compiles a function of two lines; finding it in the cache takes a second and a half.
    torch._dynamo.config.disable = "--torch_compile" not in argv
    _fork_for_spawned()
    if Path(argv[0]).name == "swift":
        argv = _command_of_swift(argv)
    if "torch.distributed.run" in argv:
        return _launch_ranks(argv)
    return _run(argv)


def _fork_for_spawned() -> None:
    """Fork `multiprocessing`'s own fork server, before a plugin is imported.

    Later processes are forked from it in place of being spawned: with pickled arguments, and with
    the environment and the main module of their parent.
    """
    server = forkserver._forkserver
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0swift-grpo-ext-spawned-{os.getpid()}")
    listener.listen()
    alive_r, alive_w = os.pipe()
    if not os.fork():
        os.close(alive_w)
        with suppress(SystemExit):
            forkserver.main(listener.detach(), alive_r, preload=[])
        os._exit(0)
    server._forkserver_address, server._forkserver_alive_fd = listener.getsockname(), alive_w
    listener.close()
    os.close(alive_r)


def _command_of_swift(argv: Sequence[str]) -> list[str]:
    """Return the command that `swift` would start, after it has read a YAML file and its `ENV`."""
    from swift.cli import main

    sys.argv = list(argv)
    with patch.object(main.subprocess, "run") as run:
        run.return_value.returncode = 0
        main.cli_main()
    [command] = run.call_args.args
    return list(command)


def _launch_ranks(argv: Sequence[str]) -> None:
    """Fork the ranks of `python -m torch.distributed.run --name value ... FILE ...`."""
    from torch.distributed import run
    from torch.distributed.launcher.api import elastic_launch

    args = run.parse_args(argv[3:])
    config, _, _ = run.config_from_args(args)
    config.start_method = "fork"
    command = [argv[0], args.training_script, *args.training_script_args]
    elastic_launch(config, _run)(command)


def _run(argv: Sequence[str]) -> None:
    """Run `python FILE ...`, `-m MODULE ...` or `-c CODE ...` to its end."""
    from tests.rig.preloaded import be_as_if_new

    be_as_if_new()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest may ignore it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # torchrun has a handler
    is_file = argv[1] not in ("-m", "-c")
    sys.path.insert(0, str(Path(argv[1]).parent if is_file else ROOT))
    sys.argv = list(argv[1 if is_file else 2 :])
    try:
        if is_file:
            runpy.run_path(argv[1], run_name="__main__")
        elif argv[1] == "-m":
            runpy.run_module(argv[2], run_name="__main__", alter_sys=True)
        else:
            sys.argv[0] = "-c"
            exec(argv[2], {"__name__": "__main__"})
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()
