"""The command line: all commands of `holdfast`, and how it ends."""

import io
import signal
import sys
from typing import Annotated, NoReturn

import typer

from holdfast import __version__
from holdfast.cli.bench import bench
from holdfast.cli.console import STOPPED, stop
from holdfast.cli.data import data
from holdfast.cli.deploy import join, provision, proxy, replay, serve, status
from holdfast.cli.results import compare, export, report, reproduce
from holdfast.cli.run import plan, resume, run
from holdfast.cli.show import methods, predict, settings, show
from holdfast.cli.watch import watch
from holdfast.errors import HoldfastError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(bench, name="bench")
app.add_typer(data, name="data")
for command in (compare, reproduce, report, export, run, resume, show, predict, plan, methods, settings, watch):
    app.command()(command)
for party in (provision, serve, proxy, join, status, replay):
    app.command(rich_help_panel="A real federation")(party)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def holdfast(
    show_version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True)] = False,
) -> None:
    """Federated class-incremental learning: many clients, ever more classes, nobody's classes forgotten."""


def main() -> None:
    """Runs the command line. A mistake is one sentence and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # where a terminal cannot show a character: a question mark
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        code = app(standalone_mode=False)
    except (HoldfastError, OSError) as error:  # a full disk is no bug: the user can mend it
        stop(str(error), 2)
    except MemoryError:
        stop("there is not enough memory; use fewer or smaller images (data.*), or a smaller batch", 2)
    except (typer.Abort, KeyboardInterrupt):
        code = STOPPED
    except Exception as error:
        # A wrong option or command; the exception's class depends on the version of typer.
        say = getattr(error, "format_message", None)
        if say is None:
            raise
        if not say():  # no command at all: the help has been printed
            sys.exit(2)
        stop(f"{' '.join(say().split()).rstrip('.')}; see 'holdfast --help'", 2)
    if code == STOPPED:
        stop("stopped; what is finished is kept, and the same command continues from there", STOPPED)
    sys.exit(code)


def _interrupt(*_: object) -> NoReturn:
    """SIGTERM (from a batch system, or when the machine shuts down) is treated like Ctrl-C, so that workers end and
    shared memory is freed."""
    raise KeyboardInterrupt
