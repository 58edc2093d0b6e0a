"""What the network costs: rounds over Flower and TLS against handing the same bytes over in one process. The sites are
light processes that answer with as many bytes as they got; so this is the courier alone, without any training."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from holdfast.bench import Ratio, Report
from holdfast.errors import HoldfastError

MEGABYTES = (1.0, 44.7)  # a small network, and ResNet-18
SITES = (3,)
ROUNDS = 3
START = 120.0  # seconds that all sites may take to connect
OVERHEAD = 1.02  # bytes on the wire against those of the messages


def measure(
    tell: Callable[[str], None], sites: Sequence[int] = SITES, megabytes: Sequence[float] = MEGABYTES
) -> Report:
    """Seconds and bytes of a round for each size of model and number of sites."""
    try:
        import flwr  # noqa: F401
    except ImportError as error:
        raise HoldfastError("this measurement needs: pip install 'holdfast[deploy]'") from error
    rows, ratios, facts = [], [], {}
    for count in sites:
        with tempfile.TemporaryDirectory() as folder:
            for size, found in _measure(Path(folder), count, megabytes, tell).items():
                label = f"{count} sites, {size:g} MB"
                rows.append([label, *(f"{found[key]:.2f}" for key in ("start", "round", "in_process", "wire"))])
                ratios.append(Ratio(f"bytes on the wire, {label}", found["wire"], OVERHEAD, at_most=True))
                facts[label] = found
    head = ["round", "start, s", "round, s", "in one process, s", "bytes on the wire / of the messages"]
    return Report(ratios, head, rows, facts)


def _measure(
    folder: Path, count: int, megabytes: Sequence[float], tell: Callable[[str], None]
) -> dict[float, dict[str, float]]:
    from holdfast.deploy.certificates import Authority, key_pem, new_key, write_secret
    from holdfast.deploy.flower import FlowerCourier, free_port
    from holdfast.deploy.gate import Gate

    authority, key = Authority.create("bench"), new_key()
    authority.save(folder / "ca")
    write_secret(folder / "server.key", key_pem(key))
    (folder / "server.crt").write_bytes(authority.issue("server", key, ["127.0.0.1"]))
    files = folder / "server.crt", folder / "server.key", folder / "ca" / "ca.crt"
    start = time.perf_counter()
    courier = FlowerCourier(folder / "flower", *files)
    place = "127.0.0.1", free_port()
    gate = Gate(place, courier.address, *files, lambda name, _, public: courier.admit(name, public), 2**30)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        courier.start()
        gate.start()
        names = [f"site-{i}" for i in range(count)]
        for i, name in enumerate(names):
            own = new_key()
            write_secret(folder / f"{name}.key", key_pem(own))
            (folder / f"{name}.crt").write_bytes(authority.issue(f"site:{name}", own, (), i))
            command = [sys.executable, "-m", "holdfast.bench.deploy", f"127.0.0.1:{place[1]}", str(folder), name]
            processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        end = time.monotonic() + START
        while len(courier.present()) < count:
            if time.monotonic() > end:
                raise HoldfastError(f"only {len(courier.present())} of {count} sites have connected")
            time.sleep(0.2)
        ready = time.perf_counter() - start
        tell(f"{count} sites connected after {ready:.1f} s")
        found = {}
        for size in megabytes:
            blobs = {name: bytes([i % 251 + 1]) * int(size * 1e6) for i, name in enumerate(names)}
            before, seconds = gate.meter.up + gate.meter.down, []
            for _ in range(ROUNDS):
                begun = time.perf_counter()
                answers = dict(courier.exchange(blobs, 900))
                seconds.append(time.perf_counter() - begun)
                if answers != {name: blob[::-1] for name, blob in blobs.items()}:
                    raise HoldfastError("a site has answered something else")
            wire = (gate.meter.up + gate.meter.down - before) / ROUNDS
            begun = time.perf_counter()
            _ = {name: blob[::-1] for name, blob in blobs.items()}
            alone = time.perf_counter() - begun
            messages = 2 * sum(map(len, blobs.values()))
            found[size] = {"start": ready, "round": min(seconds), "in_process": alone, "wire": wire / messages}
            tell(f"{count} sites, {size:g} MB: {min(seconds):.2f} s a round")
        return found
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(20)
        gate.stop()
        courier.stop()


def answer(address: str, folder: Path, name: str) -> None:
    """A light site: it answers with the bytes in reverse."""
    import httpx

    from holdfast import __version__
    from holdfast.deploy.certificates import load_key
    from holdfast.deploy.flower_node import FlowerNode
    from holdfast.deploy.gate import JOIN

    authority = folder / "ca" / "ca.crt"

    def announce() -> int:
        body = {"certificate": (folder / f"{name}.crt").read_text(), "version": __version__}
        found = httpx.post(f"https://{address}{JOIN}", json=body, verify=str(authority), timeout=60)
        return int(found.json()["node"])

    key = load_key(folder / f"{name}.key")
    FlowerNode(address, authority, key, announce, lambda blob: blob[::-1]).serve(lambda: False)


if __name__ == "__main__":
    answer(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
