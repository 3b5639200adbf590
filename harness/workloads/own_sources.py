"""Finds the files on which a user's own object (``module:object``) depends, so that records can keep their digests.

Three kinds of files are found: the object's module; the modules that it imports, directly or through other modules; and
the files that the sources of all these modules name, such as data files and kernels with their headers.  Libraries and
this project's packages are left out, since records keep their versions.

The sources are parsed, and no user code runs.  Which files a source names is guessed from its string constants, so
the result may have files that the object does not need, which is harmless, and may lack files whose names are computed
at run time.  This module does not import torch.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, Final

_ROOT: Final = Path(__file__).resolve().parents[2]
_STDLIB: Final = Path(sysconfig.get_paths()["stdlib"]).resolve()
_OURS: Final = tuple(_ROOT / name for name in ("impl", "harness", "report", "zeropp"))
_INSTALLED: Final = frozenset(("site-packages", "dist-packages"))
_NO_FILES: Final = tuple(map(Path, ("/dev", "/proc", "/sys", "/run")))  # folders with the state of the system
_MODULE: Final = re.compile(r"\.*[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
# A source that mentions one of these may import modules whose names are strings; other sources cannot.
_DYNAMIC: Final = re.compile(
    rb"__import__|importlib|import_module|find_spec|pkgutil|runpy|lazy", re.IGNORECASE
)
# A function whose name begins with one of these words writes files, so the files that its calls name are no inputs.
_WRITING: Final = re.compile(
    r"save|write|dump|to_(csv|json|pickle|parquet)|export|FileHandler|mkdir|makedirs|touch|unlink|remove|rename"
)
_INCLUDE: Final = re.compile(rb'^\s*#\s*include\s*"([^"\n]+)"', re.MULTILINE)
_KERNELS: Final = (".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp")
# Functions that return a path; "" stands for expressions that are no calls.
_JOINING: Final = ("", "Path", "PurePath", "fspath", "join", "joinpath", "resolve", "str", "with_name")
# Patterns for files of one suffix in a folder, such as data/*.txt; patterns like ** or * would match too much.
_PATTERN: Final = re.compile(r"(?=.*\*)(?!.*\*\*)(?!/)[\w.*/-]*\.[A-Za-z]\w*")
_LONGEST_PATH: Final = 255  # characters; longer texts are no paths


@dataclass(frozen=True, slots=True)
class _Source:
    """A module, or a file that a source names."""

    name: str  # dotted name of the module; for a file, ``<text> of <module>``: the text that names it, and where
    file: Path | None = None  # None for a namespace package
    package: str = ""  # the package that relative imports start from
    folders: tuple[str, ...] = ()  # folders with the submodules of a package
    named: bool = False  # whether it is a file that a source names


@dataclass(slots=True)
class _Mentions:
    """The texts in a source that may name modules or files."""

    # Names of imported modules and of imported members of modules; a relative name begins with a dot.
    imports: list[str] = field(default_factory=list)
    # Texts in ``__all__``, which may name submodules of a package.
    exports: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)  # constants that may name modules
    paths: list[str] = field(default_factory=list)  # constants that may name files or folders
    patterns: list[str] = field(default_factory=list)  # patterns of file names; * stands for computed parts
    computed: bool = False  # whether the source imports modules whose names it computes
    changes_path: bool = False  # whether the source changes ``sys.path``


def files_of(
    modules: Iterable[str], texts: Sequence[str] = (), folders: Sequence[Path] = ()
) -> tuple[dict[str, Path], dict[str, Path]]:
    """Find the files of a user's modules and of the modules they import, and the files that all their sources name.

    Args:
        modules: Dotted names of the modules.
        texts: Further texts that may name modules or files, such as a suite's ``model.arguments``.
        folders: Where to look for a named file if the folder of the source that names it does not have it.

    Returns:
        Two dicts.  The first has the file of each module; its keys are the modules' dotted names.  The second has all
        other files.  If a source names the file, the key is ``<name in the source> of <module>``.  If ``texts`` names
        the file, the key is this text.
    """
    importlib.invalidate_caches()
    names = [*modules]
    added_folders: list[Path] = []  # folders that sources may add to sys.path
    while True:  # repeat until no source adds a further folder, in which modules may be found
        known = len(added_folders)
        chains = [(name, _resolve(name, "", added_folders)) for name in names]
        waiting = [source for name, chain in chains if chain and chain[-1].name == name for source in chain]
        for text in texts:
            waiting += _resolve(text.partition(":")[0], "", added_folders)
            waiting += [
                _Source(text, file, named=True) for file in _existing(text, folders) if file.is_file()
            ]
        found = dict[str, _Source]()
        while waiting:
            source = waiting.pop()
            if source.name not in found and source.file is not None and _is_users(source.file):
                found[source.name] = source
                waiting += _followed(source, source.file, added_folders, folders)
        if len(added_folders) == known:
            break
    sources = [found[name] for name in sorted(found)]
    imported = {source.name: source.file for source in sources if source.file and not source.named}
    named = {source.name: source.file for source in sources if source.file and source.named}
    return imported, {name: file for name, file in named.items() if file not in imported.values()}


def _followed(
    source: _Source, file: Path, added_folders: list[Path], folders: Sequence[Path]
) -> Iterator[_Source]:
    """Yield the modules that a source imports, and the files that it names.

    Args:
        source: The module or other file.  Only Python sources and kernels are searched for imports and names.
        file: The path of the source.
        added_folders: Folders that the sources searched so far may add to ``sys.path``.  If this source changes
            ``sys.path``, the folders that it may add are appended to this list.
        folders: Where to look for a named file if the source's own folder does not have it.
    """
    holder = source.name.partition(" of ")[2] or source.name
    if file.suffix in _KERNELS:
        yield from (_named(text, path, holder) for text, path in _included(file, *stamp(file)))
    if file.suffix != ".py":
        return
    mentions = _mentions(file, *stamp(file))
    if mentions.changes_path:
        named = [path for text in mentions.paths for path in _existing(text, [file.parent]) if path.is_dir()]
        added_folders += [path for path in (*file.parents[:3], *named) if path not in added_folders]
    exports = mentions.exports if source.folders else []
    for name in [*mentions.imports, *(f".{name}" for name in exports)]:
        yield from _resolve(name, source.package, added_folders)
    for text in mentions.texts:
        reached = _resolve(text.rstrip("."), source.package, added_folders)
        yield from reached or _resolve(f".{text}", source.package, added_folders)
        if text.endswith(".") and reached:  # as in "package." + name, where `name` may be any submodule
            yield from _parts(reached[-1])
    if mentions.computed and source.package:
        yield from _parts(_resolve(source.package, "", added_folders)[-1])
    places = [file.parent, *folders]
    above = file.resolve().parents
    named_folders = [
        path
        for text in mentions.paths
        for path in _existing(text, places)
        if path.is_dir() and path.resolve() not in above
    ]
    for text in mentions.paths:
        # A folder may be named in one expression and a file of it in another: DATA = HERE / "data"; DATA / "x".
        for path in _existing(text, [*places, *named_folders], files=True):
            yield _named(text, path, holder)
    for pattern in mentions.patterns:
        for folder in [file.parent, *named_folders]:
            for path in sorted(folder.glob(pattern)):
                if path.is_file() and path != file:
                    yield _named(str(path.relative_to(folder)), path, holder)


def _named(text: str, path: Path, holder: str) -> _Source:
    """Return a :class:`_Source` for the file ``path``, which the module ``holder`` names by the constant ``text``."""
    return _Source(f"{path.name if Path(text).is_absolute() else text} of {holder}", path, named=True)


@cache
def _included(file: Path, _time: int, _size: int) -> list[tuple[str, Path]]:
    """Return the files that a kernel's source includes by a path relative to its own folder.

    The result has pairs (name in the source, path).  ``_time`` and ``_size`` are the file's :func:`stamp`.  They are
    part of the key of this function's cache, so that a changed file is read again.
    """
    try:
        names = [name.decode(errors="replace") for name in _INCLUDE.findall(file.read_bytes())]
    except OSError:
        return []
    return [(name, path) for name in names for path in _existing(name, [file.parent], files=True)]


def _resolve(name: str, package: str, added_folders: Sequence[Path]) -> list[_Source]:
    """Find a module without importing it, and the packages that contain it.

    Args:
        name: Dotted name of the module.  A name that begins with a dot is relative to ``package``.
        package: Dotted name of a package.
        added_folders: Folders that are searched after the folders of ``sys.path``.

    Returns:
        The packages that contain the module, from the outermost to the innermost, and then the module itself.  If a
        package or the module does not exist, the list ends before it.  For a module of a library, the list has only the
        library's outermost package.
    """
    if _MODULE.fullmatch(name) is None:
        return []
    try:
        parts = importlib.util.resolve_name(name, package or None).split(".")
    except ImportError:  # above the top package
        return []
    modules: list[_Source] = []
    folders: Sequence[str] | None = None
    for length in range(1, len(parts) + 1):
        full = ".".join(parts[:length])
        spec = _top_level(full, added_folders) if folders is None else _spec(PathFinder, full, folders)
        # Finders find a namespace package inside another package only after the outer package is imported, so look
        # in its folders here.
        if spec is None:
            inner = [folder for f in folders or () if (folder := Path(f) / parts[length - 1]).is_dir()]
            file, folders = None, [*map(str, inner)]
        else:
            file, folders = _file(spec), spec.submodule_search_locations
        if spec is None and not folders:
            break
        package = full.rpartition(".")[0] if folders is None else full
        modules.append(_Source(full, file, package, tuple(folders or ())))
        if folders is None or (file is not None and not _is_users(file)):
            break
    return modules


def _top_level(name: str, added_folders: Sequence[Path]) -> ModuleSpec | None:
    """Find the spec of a top-level module in the folders of ``sys.path`` or, if it is not there, in ``added_folders``.

    ``sys.modules`` is not consulted, since another module may be imported under this name.  Returns None if no folder
    has such a module.
    """
    for finder in sys.meta_path:
        if (spec := _spec(finder, name, None)) is not None:
            return spec
    return _spec(PathFinder, name, [str(folder) for folder in added_folders])


def _spec(finder: Any, name: str, folders: Sequence[str] | None) -> ModuleSpec | None:
    try:
        found = finder.find_spec(name, folders)
    except Exception:  # a library may have installed a finder that raises anything
        return None
    return found if isinstance(found, ModuleSpec) else None


def _file(spec: ModuleSpec) -> Path | None:
    """Return a module's file or, if the module is in an archive, the file of the archive.

    Returns None for built-in modules and namespace packages.
    """
    if spec.origin is None or not spec.has_location:
        return None
    origin = Path(spec.origin)
    return next((path for path in (origin, *origin.parents) if path.is_file()), None)


def _parts(package: _Source) -> Iterator[_Source]:
    """Yield all modules in the folders of a package and their subfolders, with the packages that contain them."""
    for folder in package.folders:
        for path in sorted(Path(folder).rglob("*.py")):
            name = ".".join((package.name, *path.relative_to(folder).with_suffix("").parts))
            yield from _resolve(name.removesuffix(".__init__"), "", ())


def _is_users(file: Path) -> bool:
    """Return whether a file is the user's, so that it belongs neither to a library nor to this project."""
    file = file.resolve()
    if file.is_relative_to(_STDLIB) or _INSTALLED & {*file.parts} or any(map(file.is_relative_to, _OURS)):
        return False
    return not any(map(_holds_distributions, file.parents))


@cache
def _holds_distributions(folder: Path) -> bool:
    """Return whether packages were installed into a folder, as ``pip install --target`` does."""
    return next(folder.glob("*.dist-info"), None) is not None


def _existing(text: str, folders: Sequence[Path], *, files: bool = False) -> list[Path]:
    """Find the file or folder with the path ``text`` relative to one of ``folders``, which are tried in order.

    ``text`` may also be an absolute path, or begin with ``~``.  With ``files``, folders are not found.

    Returns:
        A list with the first path that exists.  The list is empty if there is none, or if it is a file of the system,
        such as one in ``/proc``.
    """
    if not text or len(text) > _LONGEST_PATH or "\0" in text or "\n" in text:
        return []
    try:
        paths = (folder / Path(text).expanduser() for folder in folders)
        path = next((path for path in paths if (path.is_file() if files else path.exists())), None)
    except (OSError, RuntimeError):  # a text that is no path here, or begins with ~ and no user's name
        return []
    return [] if path is None or any(map(path.is_relative_to, _NO_FILES)) else [path]


def stamp(file: Path) -> tuple[int, int]:
    """Return the time of the last change of a file, in ns, and its size in bytes.

    Together they show whether the file has changed.  Returns (0, 0) if they cannot be read.
    """
    try:
        status = file.stat()
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_size


@cache
def _mentions(file: Path, _time: int, _size: int) -> _Mentions:
    """Collect the modules and files that a source may name.

    If the source cannot be read or parsed, the result is empty.  ``_time`` and ``_size`` are the file's :func:`stamp`.
    They are part of the key of this function's cache, so that a changed file is read again.
    """
    mentions = _Mentions()
    try:
        content = file.read_bytes()
        tree = ast.parse(content)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return mentions
    dynamic = _DYNAMIC.search(content) is not None
    mentions.changes_path = b"sys.path" in content or b"addsitedir" in content
    names = _written_names(tree)
    no_input = {
        id(part)
        for node in ast.walk(tree)
        if _is_documentation(node) or _writes(node) or (_targets(node) & names and _joins(node))
        for part in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            mentions.imports += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            mentions.imports += [base] if node.module else []
            mentions.imports += [f"{base}{'.' * bool(node.module)}{alias.name}" for alias in node.names]
        elif "__all__" in _targets(node):
            mentions.exports += _texts(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            mentions.texts += [node.value] if dynamic else []
            mentions.paths += [node.value] if id(node) not in no_input else []
        elif isinstance(node, ast.Call | ast.BinOp | ast.JoinedStr) and id(node) not in no_input:
            parts = _texts(node)  # of HERE / "data" / "words.txt", or of "data/" + name + ".txt"
            several = len(parts) > 1 or isinstance(node, ast.JoinedStr)
            mentions.paths += ["/".join(parts), "".join(parts)] if several else []
            mentions.paths += [file.stem + text for text in parts if _called(node) == "with_suffix"]
        mentions.computed |= dynamic and _imports_computed(node)
    mentions.patterns = [text for text in mentions.paths if _PATTERN.fullmatch(text)]
    mentions.paths = [text for text in mentions.paths if "*" not in text]
    return mentions


def _texts(node: ast.AST) -> list[str]:
    """Return the texts in an expression, in order.

    An f-string is one text, in which ``*`` stands for each computed part: ``f"data/{name}.txt"`` gives ``data/*.txt``.
    """
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    texts = [text for child in ast.iter_child_nodes(node) for text in _texts(child)]
    if isinstance(node, ast.FormattedValue):
        return ["*"]
    return ["".join(texts)] if isinstance(node, ast.JoinedStr) else texts


def _called(node: ast.AST | None) -> str:
    """Return the last name of the function that a call calls: ``join`` for ``os.path.join()``.

    Returns an empty text if the node is no call.
    """
    function = node.func if isinstance(node, ast.Call) else None
    return str(getattr(function, "attr", "") or getattr(function, "id", ""))


def _imports_computed(node: ast.AST) -> bool:
    """Return whether a node is a call that imports a module by a computed name, or lists the modules of a package."""
    name = _called(node)
    first = node.args[0] if isinstance(node, ast.Call) and node.args else None
    by_name = name in ("import_module", "__import__") and not isinstance(first, ast.Constant)
    return by_name or name in ("iter_modules", "walk_packages")


def _writes(node: ast.AST) -> bool:
    """Return whether a node is a call that writes a file.

    Such a call also names a file, but this file is no input of the user's object.
    """
    if not isinstance(node, ast.Call) or _called(node) != "open":
        return _WRITING.match(_called(node)) is not None
    modes = [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg == "mode")]
    return any(re.fullmatch(r"[rbt+]*[wax+][wxbt+]*", t) for mode in modes for t in _texts(mode))


def _written_names(tree: ast.AST) -> set[str]:
    """Return the names of all variables, attributes and functions that occur in calls that write files.

    A path that is assigned to such a name is taken to be an output, and no input of the user's object.
    """
    parts = (part for node in ast.walk(tree) if _writes(node) for part in ast.walk(node))
    return {str(getattr(part, "attr", "") or getattr(part, "id", "")) for part in parts} - {""}


def _targets(node: ast.AST) -> set[str]:
    """Return the names of the variables and attributes that a statement assigns; empty for other nodes."""
    targets = [getattr(node, "target", None)] if isinstance(node, ast.AnnAssign | ast.AugAssign) else []
    targets += node.targets if isinstance(node, ast.Assign) else []
    return {str(getattr(target, "attr", "") or getattr(target, "id", "")) for target in targets} - {""}


def _joins(node: ast.AST) -> bool:
    """Return whether the assignment ``node`` may assign a path to a variable.

    There are three cases:

    - The assigned value is no function call, for example ``Path("a") / "b"``: True.
    - It is a call of a function that may return a path, for example ``join("a", "b")``: True.
    - It is another call, for example ``read("a")``: False.
    """
    return _called(getattr(node, "value", None)) in _JOINING


def _is_documentation(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
