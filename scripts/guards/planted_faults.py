"""Plants faults in the scheduler one at a time. The simulation must find each of them.

    python scripts/guards/planted_faults.py [--only WORD ...] [--histories 10000]

The faults are in `planted_faults.txt`, in the form of `mutants.txt`, with a name in place of tests.
Each runs in a copy of what git tracks. The script prints after how many histories and by which
check the fault was found. The exit code is 1 if a fault is not found.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mutants import AT_ONCE, ROOT, Mutant, copy_of, mutants_in, places, plant

LIST = Path(__file__).with_name("planted_faults.txt")
FOUND = re.compile(r"found within (\d+) histories.*\n([^:\n]*)")


def found_by(fault: Mutant, histories: int, tree: Path) -> tuple[bool, str]:
    """Return whether the simulation finds the fault, and a description."""
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_of(tree, Path(folder))
        if plant(copy, fault) is None:
            return False, f"its text appears {len(places(copy, fault.old))} times"
        command = [sys.executable, "scripts/guards/simulate.py", "--histories", str(histories)]
        environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
        ended = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    match = FOUND.search(ended.stdout)
    if match is None:
        return (
            False,
            "NOT FOUND" if ended.returncode == 0 else f"it cannot be tried ({ended.stderr[-300:]})",
        )
    return True, f"{match[1]:>6} histories: {match[2]}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--only",
        nargs="*",
        default=[""],
        help="faults whose text or name contains one of these words",
    )
    parser.add_argument("--histories", type=int, default=10_000)
    given = parser.parse_args(arguments)
    faults = [
        each
        for each in mutants_in(LIST.read_text())
        if any(word in "\n".join(each) for word in given.only)
    ]
    is_found = []
    with ThreadPoolExecutor(AT_ONCE) as executor:
        results = executor.map(lambda fault: found_by(fault, given.histories, ROOT), faults)
        for fault, (found, words) in zip(faults, results, strict=True):
            print(f"{fault.tests:75} {words}", flush=True)
            is_found.append(found)
    print(f"{sum(is_found)} of {len(faults)} faults found")
    return int(not all(is_found) or not faults)


if __name__ == "__main__":
    sys.exit(main())
