"""Puts finished runs into an archive: `python scripts/archive_runs.py ARCHIVE RUNFOLDER... [--commit SHA]`.

`runs/tiny-mini/lga-2021` becomes the run `tiny-mini/lga-2021` of the archive, in place of one of that name; `--commit`
is that of the code which made the runs. Trials of scripts/tune.py that diverged go in, too, without a result. Without
folders every run of the archive is called by the label that its settings have now; nothing else of it changes."""

import argparse
import sys
from pathlib import Path

from holdfast.errors import HoldfastError
from holdfast.methods import method_of
from holdfast.results import archive
from holdfast.results.record import complete
from holdfast.results.runs import add_to_archive


def relabel(file: Path) -> int:
    """Labels all runs again by their settings; returns how many labels were others."""
    lines = list(archive.read(file))
    changed = 0
    for line in lines:
        if line["config"] is None or line["result"] is None:
            continue
        config = complete(line["config"])
        label = method_of(config["method"]).title(config["model"]["name"])
        changed += label != line["result"]["method"]
        line["config"], line["result"]["method"] = config, label
    archive.add(file, lines)
    return changed


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("archive", type=Path, help="a file such as benchmarks/tiny-mini.jsonl.gz")
    parser.add_argument("folders", type=Path, nargs="*", help="folders of finished runs; none: label the runs again")
    parser.add_argument("--commit", help="the commit of the code that made the runs")
    given = parser.parse_args()
    if not given.archive.name.endswith(".jsonl.gz"):
        sys.exit(f"{given.archive} is no name for an archive; let it end in .jsonl.gz")
    try:
        if not given.folders:
            print(f"{given.archive}: {relabel(given.archive)} runs have another label now")
            return
        names = add_to_archive(given.archive, given.folders, given.commit)
    except HoldfastError as error:
        sys.exit(str(error))
    print(f"{given.archive}: {', '.join(names)}")


if __name__ == "__main__":
    main()
