"""The `monarch` command. It parses, and leaves the work to the module behind each subcommand.

Each subcommand stands here twice, one below the other: what can be said to it, and what it does. The imports of a
subcommand happen when it runs: `monarch --version` answers without loading the actor system.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Final, TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: that of this process) and return the exit status."""
    _open_standard_streams()
    args = _parser().parse_args(argv)
    try:
        status = int(args.run(args))
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130  # as a shell reports a process that SIGINT ended
    except BrokenPipeError:  # whoever reads the output has seen enough, like `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter flushes once more at its end
        return 141
    return status


def _open_standard_streams() -> None:
    """One that is closed would be what is opened next, whatever that is."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)


def _parser() -> argparse.ArgumentParser:
    from monarch import __version__

    parser = argparse.ArgumentParser(
        prog="monarch",
        description="Actors in meshes of processes.",
    )
    parser.add_argument("--version", action="version", version=f"monarch {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in _COMMANDS:
        add(commands)
    return parser


def _positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return number


def _sizes(text: str) -> dict[str, int]:
    """`gpus=2,x=3`"""
    sizes: dict[str, int] = {}
    for each in text.split(","):
        label, equals, number = each.partition("=")
        if not label or not equals or not number.isdecimal():
            raise argparse.ArgumentTypeError(f"{text!r} is not of the form DIM=N,DIM=N")
        sizes[label] = int(number)
    return sizes


def _variable(text: str) -> tuple[str, str]:
    """`NAME=VALUE`"""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=VALUE")
    return name, value


def _failed(command: str, error: object) -> int:
    """Say why, and return the status."""
    print(f"monarch {command}: {error}", file=sys.stderr)
    return 1


def _add_demo(commands: Commands) -> None:
    demo = commands.add_parser(
        "demo",
        help="search the files of this Python installation with a mesh of processes",
        description="Build a search engine over the source and documentation files of this Python installation, on a "
        "mesh of processes, and ask it a few things. The code is examples/search.py, installed as "
        "monarch.examples.search.",
    )
    demo.add_argument("--procs", type=_positive, metavar="N", help="processes in the mesh (default: by CPU count)")
    demo.add_argument("--query", nargs="+", action="extend", metavar="TEXT", help="what to search for")
    demo.add_argument("--limit-files", type=_positive, metavar="N", help="index at most N files")
    demo.set_defaults(run=_demo)
    _add_train(demo.add_subparsers(title="other demos", metavar="DEMO"))


def _demo(args: argparse.Namespace) -> int:
    search = import_module("monarch.examples.search")
    search.main(procs=args.procs, queries=args.query, limit_files=args.limit_files)
    return 0


def _add_train(demos: Commands) -> None:
    train = demos.add_parser(
        "train",
        help="train a network, kill one of its processes, and go on",
        description="Train a small network with several replicas in processes of their own, kill one of them with "
        "SIGKILL, and go on with the weights of a survivor. The code is examples/fault_tolerant_training.py; it needs "
        "pip install 'monarch-actors[examples]'.",
    )
    train.add_argument("--replicas", type=_positive, default=2, metavar="N", help="at least 2 (default: 2)")
    train.add_argument("--steps", type=_positive, default=300, metavar="N", help="at least 6 (default: 300)")
    train.add_argument("--plot", default="losses.png", metavar="FILE", help="where the curve of losses goes, as a PNG")
    train.set_defaults(run=_demo_train)


def _demo_train(args: argparse.Namespace) -> int:
    try:
        training = import_module("monarch.examples.fault_tolerant_training")
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "sklearn"):
            raise
        print(f"monarch demo train needs {error.name}: pip install 'monarch-actors[examples]'", file=sys.stderr)
        return 1
    if args.replicas < 2 or args.steps < 6:
        print("monarch demo train needs 2 replicas and 6 steps, at least", file=sys.stderr)
        return 2
    training.main(replicas=args.replicas, steps=args.steps, plot=args.plot)
    return 0


def _add_ps(commands: Commands) -> None:
    ps = commands.add_parser(
        "ps",
        help="show what running programs do: hosts, processes, actors",
        description="Show your running programs on this machine as trees of hosts, processes and actors: which "
        "endpoint each actor runs and since when, how many calls wait for it, how often it was restarted, and the "
        "memory of its process. Asks the drivers, and disturbs nothing.",
    )
    ps.set_defaults(run=_look, stacks=False, pattern=None)
    _add_selection(ps)


def _add_stack(commands: Commands) -> None:
    stack = commands.add_parser(
        "stack",
        help="show the Python stacks of running programs",
        description="Show the Python stacks of the processes of your running programs on this machine, actors that run "
        "an endpoint first. A process that does not answer, because native code holds its interpreter, is asked by a "
        "signal (setting stack_signal); no further rights are needed.",
    )
    stack.add_argument(
        "pattern",
        nargs="?",
        metavar="PATTERN",
        help="only processes, actors and threads with this in their name, or a pid",
    )
    stack.set_defaults(run=_look, stacks=True)
    _add_selection(stack)


def _add_selection(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pid", type=_positive, help="only the program whose driver has this process id")
    parser.add_argument("--json", action="store_true", help="print a list of programs for other programs to read")


def _look(args: argparse.Namespace) -> int:
    snapshots = import_module("monarch.mesh.console").ask_all(args.stacks, args.pid)
    if not snapshots:
        which = "" if args.pid is None else f" with a driver of pid {args.pid}"
        print(f"no monarch program of yours{which} runs on this machine", file=sys.stderr)
        return 1
    if args.pattern is not None:
        snapshots = [found for each in snapshots if (found := each.matching(args.pattern)).hosts]
        if not snapshots:
            print(f"no process, actor or thread has {args.pattern!r} in its name", file=sys.stderr)
            return 1
    if args.json:
        print(json.dumps([each.to_json() for each in snapshots], indent=2))
        return 0
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names that the terminal cannot show
    from rich.console import Console

    console = Console(highlight=False)
    for at, each in enumerate(snapshots):
        if at:
            console.print()
        import_module("monarch.mesh.rendering").show(each, console)
    return 0


def _add_worker(commands: Commands) -> None:
    worker = commands.add_parser(
        "worker",
        help="serve this host for clients elsewhere",
        description="Serve this host: clients attach with monarch.actor.attach_to_workers, and spawn processes here. "
        "Beyond loopback it needs a secret that all hosts share: MONARCH_SECRET_FILE (see `monarch secret new`).",
    )
    worker.add_argument(
        "--listen",
        required=True,
        metavar="ADDRESS",
        help="tcp://HOST:PORT, ipc:///PATH, ADVERTISE@BIND, or tcp://HOST:fd7 for an inherited socket",
    )
    worker.add_argument("--until-eof", action="store_true", help="end when the standard input ends")
    worker.add_argument(
        "--secret-from-stdin", action="store_true", help="the first line of the standard input is the secret"
    )
    worker.set_defaults(run=_worker)


def _worker(args: argparse.Namespace) -> int:
    from monarch.errors import MonarchError
    from monarch.mesh.worker import serve

    try:
        serve(
            args.listen,
            until_eof=args.until_eof,
            secret_from_stdin=args.secret_from_stdin,
            tell=not args.until_eof,  # whoever holds the other end has started it, and knows
        )
    except (MonarchError, ValueError, OSError) as error:
        return _failed("worker", error)
    return 0


def _add_secret(commands: Commands) -> None:
    secret = commands.add_parser(
        "secret", help="the secret that the hosts of a job share", description="The secret that hosts of a job share."
    )
    actions = secret.add_subparsers(title="actions", metavar="ACTION", required=True)
    new = actions.add_parser(
        "new",
        help="make one",
        description="Make a secret, and put it into FILE, which only you can read, or print it. Copy the file to all "
        "hosts, and set MONARCH_SECRET_FILE on each to its path.",
    )
    new.add_argument("file", nargs="?", metavar="FILE", help="where to put it; there must be no such file yet")
    new.set_defaults(run=_new_secret)


def _new_secret(args: argparse.Namespace) -> int:
    from monarch.mesh import trust

    secret = trust.new_secret()
    if args.file is None:
        print(secret)
        return 0
    try:
        made = trust.write_secret(args.file, secret)
    except OSError as error:
        return _failed("secret new", error)
    return 0 if made else _failed("secret new", f"{args.file} is there already, and stays as it is")


def _add_apply(commands: Commands) -> None:
    apply = commands.add_parser(
        "apply",
        help="start the job that a module describes",
        description="Ask for the hosts of a job, and remember it as that of the current context, in .monarch/. They "
        "are kept until `monarch kill`.",
    )
    apply.add_argument(
        "job",
        nargs="?",
        metavar="MODULE.ATTRIBUTE",
        help="a job of monarch.job, in a module found from here (default: that of the context, from last time)",
    )
    apply.set_defaults(run=_apply)


def _apply(args: argparse.Namespace) -> int:
    commands = import_module("monarch.job.commands")
    try:
        name, job = commands.apply(args.job)
    except (commands.NoJob, RuntimeError) as error:
        return _failed("apply", error)
    print(f"{name} is the current job, with the id {job.apply_id}")
    return 0


def _add_exec(commands: Commands) -> None:
    run = commands.add_parser(
        "exec",
        help="run a command on the hosts of a job",
        description="Run a command on hosts of the current job: in the first process of the first mesh, where nothing "
        "else is said, with its output here. The status is the largest of all.",
    )
    where = run.add_mutually_exclusive_group()
    where.add_argument("--all", action="store_true", help="in all processes of all meshes, with files for their output")
    where.add_argument("--one", action="store_true", help="in the first process of the mesh")
    where.add_argument("--point", type=_sizes, metavar="DIM=N,...", help="in that process of the mesh")
    run.add_argument("--mesh", metavar="NAME", help="on that mesh: in all its processes, with files for their output")
    run.add_argument("--per-host", type=_sizes, metavar="DIM=N", help="with so many processes on each host")
    run.add_argument(
        "-e", "--env", type=_variable, action="append", default=[], metavar="NAME=VALUE", help="with that variable"
    )
    run.add_argument("--workdir", metavar="DIR", help="in that directory")
    run.add_argument("--kill", action="store_true", help="end the job afterwards")
    run.add_argument("--script", metavar="FILE", help="run the bash script in FILE; - for the standard input")
    run.add_argument("-m", dest="module", metavar="MODULE", help="run a Python module")
    run.add_argument("words", nargs=argparse.REMAINDER, metavar="COMMAND ...", help="the program, and its arguments")
    run.set_defaults(run=_exec)


def _exec(args: argparse.Namespace) -> int:
    commands = import_module("monarch.job.commands")
    words = args.words[1:] if args.words[:1] == ["--"] else args.words
    try:
        status: int = commands.execute(
            commands.command_of(words, args.script, args.module),
            mesh=args.mesh,
            everywhere=args.all,
            one=args.one,
            point=args.point,
            per_host=args.per_host,
            env=dict(args.env),
            workdir=args.workdir,
            kill=args.kill,
        )
    except (commands.NoJob, RuntimeError, ValueError) as error:
        return _failed("exec", error)
    return status


def _add_shell(commands: Commands) -> None:
    shell = commands.add_parser(
        "shell",
        help="work with a shell on a host of a job",
        description="Work with a shell on a host of the current job: in the first one of the first mesh, where nothing "
        "else is said. What is typed goes there, or what comes through the standard input, until its end. The status "
        "is that of the shell. What it leaves running ends with it.",
    )
    shell.add_argument("--mesh", metavar="NAME", help="of that mesh")
    shell.add_argument("--point", type=_sizes, metavar="DIM=N,...", help="that host of the mesh")
    shell.add_argument(
        "-e", "--env", type=_variable, action="append", default=[], metavar="NAME=VALUE", help="with that variable"
    )
    shell.add_argument("--workdir", metavar="DIR", help="in that directory")
    shell.add_argument("--kill", action="store_true", help="end the job afterwards")
    shell.set_defaults(run=_shell)


def _shell(args: argparse.Namespace) -> int:
    commands = import_module("monarch.job.commands")
    try:
        status: int = commands.shell(
            mesh=args.mesh, point=args.point, env=dict(args.env), workdir=args.workdir, kill=args.kill
        )
    except BrokenPipeError:
        raise
    except (commands.NoJob, RuntimeError, ValueError, OSError) as error:
        return _failed("shell", error)
    return status


def _add_kill(commands: Commands) -> None:
    kill = commands.add_parser(
        "kill", help="end a job", description="End the job of a context, and give its hosts back."
    )
    kill.add_argument("context", nargs="?", metavar="NAME", help="the context (default: the current one)")
    kill.set_defaults(run=_kill)


def _kill(args: argparse.Namespace) -> int:
    commands = import_module("monarch.job.commands")
    try:
        commands.kill(args.context)
    except (commands.NoJob, RuntimeError, ValueError) as error:
        return _failed("kill", error)
    return 0


def _add_context(commands: Commands) -> None:
    context = commands.add_parser(
        "context",
        help="keep several jobs apart",
        description="Several jobs side by side in one directory, each in a context with a name. One context is the "
        "current one: the other commands, and programs, look there for their job.",
    )
    actions = context.add_subparsers(title="actions", metavar="ACTION", required=True)
    create = actions.add_parser(
        "create",
        help="make one",
        description="Make a context, without a job; `monarch context use` makes it the current one.",
    )
    create.add_argument("name", metavar="NAME")
    create.add_argument("job", nargs="?", metavar="MODULE.ATTRIBUTE", help="what `monarch apply` starts there")
    create.set_defaults(run=_create_context)
    use = actions.add_parser(
        "use",
        help="make one the current one",
        description="Make a context the current one. Jobs of others go on. A job from before there were contexts "
        "becomes that of the context `default`.",
    )
    use.add_argument("name", metavar="NAME")
    use.set_defaults(run=_use_context)
    remove = actions.add_parser(
        "rm",
        help="remove one",
        description="Remove a context. The current one, and one with a job that is active, stay, unless --force says "
        "otherwise.",
    )
    remove.add_argument("name", metavar="NAME")
    remove.add_argument("-f", "--force", action="store_true", help="remove it in any case; an active job is killed")
    remove.set_defaults(run=_remove_context)
    listing = actions.add_parser(
        "ls", help="list them", description="List the contexts, with the current one marked, and what their jobs do."
    )
    listing.set_defaults(run=_list_contexts)


def _create_context(args: argparse.Namespace) -> int:
    commands, contexts = import_module("monarch.job.commands"), import_module("monarch.job.contexts")
    try:
        contexts.check_name(args.name)
        if args.job is not None:
            commands.check_spec(args.job)
        contexts.create(args.name, args.job or "")
    except (commands.NoJob, RuntimeError, ValueError) as error:
        return _failed("context create", error)
    print(f"{args.name} is there; `monarch context use {args.name}` makes it the current context")
    return 0


def _use_context(args: argparse.Namespace) -> int:
    try:
        import_module("monarch.job.contexts").use(args.name)
    except (RuntimeError, ValueError) as error:
        return _failed("context use", error)
    print(f"{args.name} is the current context")
    return 0


def _remove_context(args: argparse.Namespace) -> int:
    import_module("monarch.job.commands").find_modules_here()
    try:
        complaint = import_module("monarch.job.contexts").remove(args.name, force=args.force)
    except (RuntimeError, ValueError) as error:
        return _failed("context rm", error)
    return _failed("context rm", complaint) if complaint else 0


def _list_contexts(args: argparse.Namespace) -> int:
    import_module("monarch.job.commands").find_modules_here()
    rows = [("CURRENT", "NAME", "JOB", "STATE")]
    for each in import_module("monarch.job.contexts").listed():
        rows.append(("*" if each.is_current else "", each.name or "-", each.spec or "-", each.state))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _add_debug(commands: Commands) -> None:
    debug = commands.add_parser(
        "debug",
        help="debug actors that wait at a breakpoint",
        description="Talk to the debugger of a running program of yours on this machine: list the actors that wait at "
        "`breakpoint()`, attach to the pdb of one, send a command to many, let them go on.",
    )
    debug.add_argument("--pid", type=_positive, help="the program whose driver has this process id")
    debug.set_defaults(run=_debug)


def _debug(args: argparse.Namespace) -> int:
    status: int = import_module("monarch.mesh.debug_terminal").run(args.pid)
    return status


def _add_rdma(commands: Commands) -> None:
    rdma = commands.add_parser(
        "rdma",
        help="say which way one-sided transfers can go on this machine",
        description="About one-sided transfers between actors (monarch.rdma).",
    )
    rdma_commands = rdma.add_subparsers(title="commands", metavar="COMMAND", required=True)
    check = rdma_commands.add_parser(
        "check",
        help="list devices, ports, GIDs and limits, try them, and say what is wrong",
        description="List the RDMA devices of this machine with their ports and GIDs, and the limits that matter; run "
        "a transfer through the best one, try shared memory, and say in words what is wrong. Status 0 when transfers "
        "between processes of this machine work, in the way that was asked for.",
    )
    check.add_argument("--target", default="", help="the device to try: nic:DEVICE, nic:DEVICE/PORT[/GID]")
    check.add_argument(
        "--path", choices=("ibverbs", "shm", "tcp"), help="the only way that will do (setting rdma_path)"
    )
    check.set_defaults(run=_rdma_check)


def _rdma_check(args: argparse.Namespace) -> int:
    settings = import_module("monarch.core.settings")
    target = args.target or settings.get("rdma_ibverbs_target")
    disabled = settings.get("rdma_disable_ibverbs")
    import_module("monarch.verbs.node").prefer(target, settings.get("rdma_binding"), disabled=disabled)
    if args.path:
        settings.configure({"rdma_path": args.path})
    report = import_module("monarch.onesided.check").Report(needs_device=bool(target))
    for line in report.lines():
        print(line, flush=True)
    return 0 if report.works else 1


_COMMANDS: Final = (
    _add_demo,
    _add_ps,
    _add_stack,
    _add_worker,
    _add_secret,
    _add_apply,
    _add_exec,
    _add_shell,
    _add_kill,
    _add_context,
    _add_debug,
    _add_rdma,
)
