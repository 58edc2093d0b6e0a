"""Start-up kits: one folder per party with its settings, keys and certificates."""

import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast import __version__
from holdfast.deploy.certificates import (
    Authority,
    fingerprint,
    key_pem,
    load_certificate,
    new_key,
    pem,
    write_secret,
)
from holdfast.deploy.settings import Agreement
from holdfast.errors import HoldfastError
from holdfast.files import write_atomic, write_json

LOOPBACK = ("localhost", "127.0.0.1")
COMMANDS = {"server": "holdfast serve .", "proxy": "holdfast proxy .", "site": "holdfast join . --images FOLDER"}


@dataclass
class Provision:
    """Writes the kits of a federation below one folder. What is there already is never changed."""

    agreement: Agreement
    out: Path
    proxy_ca: Path | None = None
    days: int = 825  # that a party's certificates are valid

    def write(self, sites: list[str]) -> list[Path]:
        """Writes the kits that are missing; returns their folders."""
        try:
            self.out.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise HoldfastError(f"cannot write to {self.out}: {error.strerror}; choose another folder") from error
        numbers = self._numbers(sites)
        self.coordinator = self._authority("coordinator", None)
        self.proxy = self._authority("proxy-operator", self.proxy_ca)
        fresh = [self._kit("server", "server", -1), self._kit("proxy", "proxy", -1)]
        fresh += [self._kit("site", site, numbers[site]) for site in sites]
        return [folder for folder in fresh if folder is not None]

    def _numbers(self, sites: list[str]) -> dict[str, int]:
        """Every site keeps its number for ever; a new one gets the next."""
        file = self.out / "federation.json"
        known: dict[str, Any] = json.loads(file.read_bytes()) if file.exists() else {"digest": self.agreement.digest}
        if known["digest"] != self.agreement.digest:
            raise HoldfastError(
                f"{self.out} holds the kits of another agreement; restore federation.toml, or choose another folder"
            )
        numbers: dict[str, int] = dict(known.get("sites", {}))
        for site in sites:
            numbers.setdefault(site, len(numbers))
        write_json(file, {"name": self.agreement.name, "digest": self.agreement.digest, "sites": numbers})
        return numbers

    def _authority(self, name: str, given: Path | None) -> Authority:
        folder = given or self.out / "authorities" / name
        if given is None and not (folder / "ca.crt").exists():
            Authority.create(f"{self.agreement.name} {name}").save(folder)
        return Authority.load(folder)

    def _kit(self, role: str, name: str, number: int) -> Path | None:
        folder = self.out / (f"site-{name}" if role == "site" else role)
        if (folder / "kit.json").exists():
            return None
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        title = f"site:{name}" if role == "site" else role
        write_atomic(folder / "coordinator-ca.crt", pem(self.coordinator.certificate))
        write_atomic(folder / "proxy-ca.crt", pem(self.proxy.certificate))
        place = {"server": self.agreement.server, "proxy": self.agreement.proxy}.get(role)
        hosts = [place.host, *LOOPBACK] if place else []
        found = number if role == "site" else None
        for channel, authority in (("coordinator", self.coordinator), ("proxy", self.proxy)):
            if (role, channel) == ("proxy", "coordinator"):
                continue  # the proxy never speaks on the coordinator's channel
            key = new_key()
            serves = hosts if (role, channel) in (("server", "coordinator"), ("proxy", "proxy")) else []
            write_secret(folder / f"{channel}.key", key_pem(key))
            write_atomic(folder / f"{channel}.crt", authority.issue(title, key, serves, found, self.days))
        seed = self.agreement.config.seed if self.agreement.shared_seeds else secrets.randbits(62)
        write_secret(folder / "secret.seed", f"{seed}\n".encode())
        write_atomic(folder / "README.md", self._readme(role, name, folder).encode())
        facts = {"version": __version__, "role": role, "name": name, "number": number, "digest": self.agreement.digest}
        write_json(folder / "kit.json", {**facts, "agreement": self.agreement.to_json()})
        os.chmod(folder, 0o700)
        return folder

    def _readme(self, role: str, name: str, folder: Path) -> str:
        prints = {
            "coordinator's CA": fingerprint(self.coordinator.certificate),
            "proxy operator's CA": fingerprint(self.proxy.certificate),
        }
        for channel in ("coordinator", "proxy"):
            if (folder / f"{channel}.crt").exists():
                prints[f"own certificate, {channel}'s channel"] = fingerprint(
                    load_certificate(folder / f"{channel}.crt")
                )
        lines = [f"- {what}: `{value}`" for what, value in prints.items()]
        who = f"the site {name}" if role == "site" else f"the {role}"
        warning = (
            "\n**For tests only: the secret seeds of this federation are shared.**\n" * self.agreement.shared_seeds
        )
        extra = {"server": "", "proxy": "", "site": "\nFOLDER holds one folder of images per class.\n"}[role]
        return f"""# Start-up kit of {who} in the federation {self.agreement.name}

Keep this folder secret: it holds private keys. Install Holdfast {__version__} with its extra `deploy`, then run here:

    {COMMANDS[role]} --check
    {COMMANDS[role]}
{extra}{warning}
Server: {self.agreement.server.address}. Proxy: {self.agreement.proxy.address}. Agreement: {self.agreement.digest}.

Compare these fingerprints with the other parties by telephone:

{chr(10).join(lines)}
"""
