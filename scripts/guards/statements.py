"""Counts the statements of each part of the package, without docstrings.

python scripts/guards/statements.py [ROOT]
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path

FORWARD_AND_BACK = "machine", "scheduling", "calls", "autograd", "submission"


def is_docstring(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def statements_in(text: str) -> int:
    nodes = ast.walk(ast.parse(text))
    return sum(isinstance(node, ast.stmt) and not is_docstring(node) for node in nodes)


def counted(root: Path) -> Counter[str]:
    """Count the statements by package, or by module for modules outside of packages."""
    found: Counter[str] = Counter()
    for folder in (root / "mpgrad", root / "workers"):
        for file in sorted(folder.rglob("*.py")):
            place = file.relative_to(root / "mpgrad" if folder.name == "mpgrad" else root)
            found[place.parts[0].removesuffix(".py")] += statements_in(file.read_text())
    return found


def main() -> None:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[2]
    found = counted(root)
    for name, count in found.most_common():
        print(f"{name:16} {count:6}")
    of_calls = sum(found[name] for name in FORWARD_AND_BACK)
    print(f"{'all':16} {found.total():6}, {of_calls} of them in {', '.join(FORWARD_AND_BACK)}")


if __name__ == "__main__":
    main()
