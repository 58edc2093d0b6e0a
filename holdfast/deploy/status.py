"""`holdfast status`: what a party has written about itself."""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.files import LONGEST, parse_json, read_limited


def read_status(state: Path) -> dict[str, Any]:
    """The last status of the party whose state is in this folder."""
    file = state / "status.json"
    try:
        facts = dict(parse_json(read_limited(file, LONGEST)))
    except OSError as error:
        raise HoldfastError(f"{file}: {error.strerror}; start the party first, or give its --state") from error
    except (ValueError, TypeError) as error:
        raise HoldfastError(f"{file} is damaged; it is written again while the party runs") from error
    return {**facts, "seconds_ago": round(time.time() - facts.get("written", 0.0), 1)}


def told(facts: Mapping[str, Any]) -> str:
    """The same in lines of text."""
    return "\n".join(_lines(facts))


def _lines(facts: Mapping[str, Any]) -> Iterator[str]:
    who = "server" if facts.get("server") else "proxy" if facts.get("proxy") is True else f"site {facts.get('site')}"
    yield f"{who}: {facts.get('state', 'running')}, as of {facts['seconds_ago']:.0f} s ago"
    yield f"round: {facts.get('round', 0)}" + (f", {facts['rounds_left']} left" if facts.get("rounds_left") else "")
    if facts.get("server"):
        accuracy = facts.get("accuracy")
        yield f"classes: {facts['classes']}, accuracy: " + ("unknown" if accuracy is None else f"{accuracy:.1%}")
    if "prototypes" in facts:
        yield f"prototypes: {facts['prototypes']}"
    if "refused" in facts:
        yield f"refused: {facts['refused']}"
    for way, count in facts.get("bytes", {}).items():
        yield f"bytes {way}: {count:,}"
    for name, site in facts.get("sites", {}).items():
        since = site.get("since")
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(since)) if since else "before the server was started"
        here = f"connected since {when}" if site["connected"] else "away"
        last = f", last counted in round {site['round']}" if site.get("round") else ""
        proxy = "" if site["proxy"] == "reached" else f", {site['proxy']}"
        yield f"site {name}: {here}{last}{proxy}"
