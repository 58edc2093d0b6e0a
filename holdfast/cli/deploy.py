"""holdfast provision, serve, proxy, join, status, replay: a real federation."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.cli.console import out as console
from holdfast.errors import HoldfastError

KitArg = Annotated[Path, typer.Argument(help="the party's start-up kit", show_default=False)]
StateOption = Annotated[Path | None, typer.Option(help="where the party keeps its state (default: KIT/state)")]
CheckOption = Annotated[bool, typer.Option("--check", help="try everything that the party needs, and stop")]


def _needs_extra() -> None:
    try:
        import flwr  # noqa: F401
        import grpc  # noqa: F401
    except ImportError as error:
        raise HoldfastError("a real federation needs: pip install 'holdfast[deploy]'") from error


def provision(
    federation: Annotated[Path, typer.Argument(help="federation.toml: what all parties agree on")],
    out: Annotated[Path, typer.Option(help="the folder for the kits")] = Path("kits"),
    proxy_ca: Annotated[
        Path | None, typer.Option(help="a folder with ca.crt and ca.key of the proxy operator's own CA")
    ] = None,
    days: Annotated[int, typer.Option(help="how long the parties' certificates are valid")] = 825,
) -> None:
    """Write one start-up kit per party; kits that are there already stay as they are."""
    _needs_extra()
    from holdfast.deploy.provision import Provision
    from holdfast.deploy.settings import read_federation

    agreement, sites = read_federation(federation)
    written = Provision(agreement, out, proxy_ca, days).write(sites)
    for folder in written:
        console.print(f"{folder}", highlight=False, soft_wrap=True)
    kept = len(sites) + 2 - len(written)
    console.print(
        f"{len(written)} kits written{f', {kept} kept' if kept else ''}; give each party its own, by a safe way, and "
        f"keep {out / 'authorities'} where nobody else can read it",
        highlight=False,
        soft_wrap=True,
    )


def serve(kit: KitArg, state: StateOption = None, check: CheckOption = False) -> None:
    """Run the global server of a federation."""
    _needs_extra()
    from holdfast.deploy import check as checks
    from holdfast.deploy.party import log_to
    from holdfast.deploy.server_process import run_server
    from holdfast.deploy.settings import read_kit

    mine = read_kit(kit, "server")
    place = state or kit / "state"
    if check:
        _report(checks.server(mine, place))
        return
    checks.certificates(mine)
    log_to()
    run_server(mine, place)


def proxy(kit: KitArg, state: StateOption = None, check: CheckOption = False) -> None:
    """Run the proxy of a federation, a party of its own."""
    _needs_extra()
    from holdfast.deploy import check as checks
    from holdfast.deploy.party import log_to
    from holdfast.deploy.proxy_service import ProxyService, start
    from holdfast.deploy.settings import read_kit
    from holdfast.results.record import only_writer

    mine = read_kit(kit, "proxy")
    place = state or kit / "state"
    if check:
        _report(checks.proxy(mine, place))
        return
    checks.certificates(mine)
    log_to()
    service = ProxyService(mine, place)
    with only_writer(place):
        server = start(service, mine.agreement.proxy.max_megabytes * 2**20)
        try:
            service.judge_forever(lambda: False)
        finally:
            server.stop(1.0)


def join(
    kit: KitArg,
    images: Annotated[Path, typer.Option(help="the folder that holds one folder of images per class")],
    state: StateOption = None,
    check: CheckOption = False,
    settled: Annotated[float, typer.Option(help="seconds after its last change when a file counts as complete")] = 2.0,
) -> None:
    """Take part in a federation with the images in a folder."""
    _needs_extra()
    from holdfast.deploy import check as checks
    from holdfast.deploy.join import join as run
    from holdfast.deploy.party import log_to
    from holdfast.deploy.settings import read_kit

    mine = read_kit(kit, "site")
    place = state or kit / "state"
    if check:
        _report(checks.site(mine, images, place))
        return
    checks.certificates(mine)
    log_to()
    run(mine, images, place, lambda: False, settled)


def _report(findings: Any) -> None:
    """Prints what was tried; the first thing that is wrong ends the command."""
    for what in findings:
        console.print(f"ok: {what}", highlight=False, soft_wrap=True)


def replay(
    record: Annotated[Path, typer.Argument(help="the server's record: KIT/state/record", show_default=False)],
    kits: Annotated[list[Path], typer.Argument(help="the kits of the sites, with their state", show_default=False)],
    images: Annotated[
        Path | None, typer.Option(help="a folder per site with the images that have left the site's own folder")
    ] = None,
) -> None:
    """Compute a real federation again as a simulation, and compare its global models round by round."""
    _needs_extra()
    from holdfast.deploy.replay import Compared
    from holdfast.deploy.replay import replay as run

    def tell(one: Compared) -> None:
        verdict = "equal" if one.same else "DIFFERENT"
        console.print(f"round {one.round}: {verdict} ({one.found[:16]})", highlight=False)

    found = run(record, kits, images, tell)
    different = [one.round for one in found if not one.same]
    if different:
        raise HoldfastError(f"{len(different)} of {len(found)} rounds differ from the simulation, first {different[0]}")
    console.print(f"all {len(found)} global models equal the simulation to the bit", highlight=False)


def status(
    kit: KitArg,
    state: StateOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="print everything as JSON")] = False,
) -> None:
    """Show how a party is doing: who is connected, which round, how good the model is."""
    from holdfast.deploy.status import read_status, told

    facts = read_status(state or kit / "state")
    print(json.dumps(facts, indent=1) if as_json else told(facts))
