"""Puts finished runs into an archive: `python scripts/archive_runs.py ARCHIVE RUNFOLDER... [--commit SHA]`.

`runs/tiny-mini/lga-2021` becomes the run `tiny-mini/lga-2021` of the archive, in place of one of that name; `--commit`
is that of the code which made the runs. Trials of scripts/tune.py that diverged go in, too, without a result."""

import argparse
import sys
from pathlib import Path

from holdfast.errors import HoldfastError
from holdfast.results.runs import add_to_archive


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("archive", type=Path, help="a file such as benchmarks/tiny-mini.jsonl.gz")
    parser.add_argument("folders", type=Path, nargs="+", help="folders of finished runs")
    parser.add_argument("--commit", help="the commit of the code that made the runs")
    given = parser.parse_args()
    if not given.archive.name.endswith(".jsonl.gz"):
        sys.exit(f"{given.archive} is no name for an archive; let it end in .jsonl.gz")
    try:
        names = add_to_archive(given.archive, given.folders, given.commit)
    except HoldfastError as error:
        sys.exit(str(error))
    print(f"{given.archive}: {', '.join(names)}")


if __name__ == "__main__":
    main()
