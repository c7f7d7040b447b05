"""Read what each source file of Kalos imports, cimports or includes, without running it.

A *unit* is what the layer table lists: ``tokens.py`` or ``backends/cpu.py`` for Python,
``_segment`` for a compiled module (``.pyx``, ``.pxd`` and ``.pyi`` together), ``kalos_plan.h`` for
C and CUDA.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "kalos_ctx"
CYTHON_SUFFIXES = {".pyx", ".pxd", ".pxi"}
C_SUFFIXES = {".h", ".c", ".cc", ".cpp", ".hpp", ".cu", ".cuh"}

_STRINGS = re.compile(r'"""(?s:.*?)"""|\'\'\'(?s:.*?)\'\'\'')
_FROM = re.compile(r"^\s*from\s+([\w.]+)\s+(c?import)\s+(\([^)]*\)|[^\n]+)", re.MULTILINE)
_IMPORT = re.compile(r"^\s*(c?import)\s+([^\n]+)", re.MULTILINE)
_EXTERN = re.compile(r"^\s*cdef\s+extern\s+from\s+[\"']([^\"'<]+)[\"']", re.MULTILINE)
_CYTHON_INCLUDE = re.compile(r"^\s*include\s+[\"']([^\"']+)[\"']", re.MULTILINE)
_C_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*\"([^\"]+)\"", re.MULTILINE)


@dataclass(frozen=True)
class Edge:
    """`unit` needs `target`: a unit of Kalos, or a foreign module's dotted name."""

    unit: str
    target: str
    foreign: bool
    path: Path


class Tree:
    """The source files under one root, and the edges between them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = sorted(self._find_files())
        self.units = {self.unit_of(path) for path in self.files}

    def _find_files(self) -> Iterator[Path]:
        for folder, suffixes in (
            (PACKAGE, {".py", ".pyi"}),
            (f"cython_ext/{PACKAGE}", CYTHON_SUFFIXES | C_SUFFIXES),
            ("cuda", C_SUFFIXES),
        ):
            for path in (self.root / folder).rglob("*"):
                # An empty __init__.pxd only makes the folder a package for Cython.
                if path.suffix in suffixes and path.name != "__init__.pxd":
                    yield path

    def unit_of(self, path: Path) -> str:
        """Return the unit that a source file belongs to."""
        relative = path.relative_to(self.root)
        if relative.parts[0] == PACKAGE:
            inside = Path(*relative.parts[1:])
            return inside.stem if path.suffix == ".pyi" else inside.as_posix()
        return path.stem if path.suffix in CYTHON_SUFFIXES else path.name

    def edges(self) -> list[Edge]:
        """Return every edge of every file, leaving out those of a unit to itself."""
        found = []
        for path in self.files:
            unit = self.unit_of(path)
            for name in _needs(path, self.root):
                target = name if isinstance(name, Path) else self._resolve(name)
                if isinstance(target, Path):
                    found.append(Edge(unit, target.name, False, path))
                elif target is None:
                    found.append(Edge(unit, name, True, path))
                elif target != unit:
                    found.append(Edge(unit, target, False, path))
        return found

    def _resolve(self, dotted: str) -> str | None:
        """Return the unit that a dotted name leads to, or None outside the package.

        The last name may be an attribute of the module before it. A module that does not exist
        gives the name of the file that is missing.
        """
        parts = dotted.split(".")
        if parts[0] != PACKAGE:
            return None
        for end in range(len(parts), 1, -1):
            stem = "/".join(parts[1:end])
            for unit in (stem, f"{stem}.py", f"{stem}/__init__.py"):
                if unit in self.units:
                    return unit
        return f"{parts[1]}.py" if len(parts) > 2 else "__init__.py"


def _needs(path: Path, root: Path) -> Iterator[str | Path]:
    """Yield dotted names for modules, and a Path for each file that is included by its name."""
    text = path.read_text(encoding="utf-8")
    if path.suffix in C_SUFFIXES:
        yield from map(Path, _C_INCLUDE.findall(text))
    elif path.suffix in CYTHON_SUFFIXES:
        yield from _cython_needs(text)
    else:
        package = path.relative_to(root).with_suffix("").parts[:-1]
        yield from _python_needs(ast.parse(text, str(path)), package)


def _python_needs(tree: ast.Module, package: tuple[str, ...]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *((node.module,) if node.module else ())))
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            first = node.args[0]
            if called in {"import_module", "__import__"} and isinstance(first, ast.Constant):
                yield str(first.value)


def _cython_needs(text: str) -> Iterator[str | Path]:
    text = re.sub(r"#[^\n]*", "", _STRINGS.sub("", text)).replace("\\\n", " ")
    for module, _, names in _FROM.findall(text):
        for name in names.strip("() \n").split(","):
            if name.strip():
                yield f"{module}.{name.split()[0]}"
    for _, names in _IMPORT.findall(text):
        yield from (name.split()[0] for name in names.split(","))
    yield from map(Path, _EXTERN.findall(text))
    yield from map(Path, _CYTHON_INCLUDE.findall(text))
