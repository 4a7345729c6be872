"""The house rules that a machine can hold, part of `make lint`: who imports whom, no pickle, sizes, words that the field has
better ones for, links, and a README tree that is that of `src`.

    python tools/check_house.py

prints every breach and exits with 1 if there is one. tests/unit/test_house.py breaks each rule once.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# A room imports itself and rooms of earlier lines, never one of its own line or of a later one.
ORDER: list[set[str]] = [
    {"products", "transfer", "errors"},
    {"types"},
    {"extras", "files", "shipped", "recipe_text"},
    {"storage"},
    {"config"},
    {"http_client"},
    {"text", "parallel"},
    {"losses"},
    {"models"},
    {"data"},
    {"students"},
    {"signals"},
    {"cache"},
    {"serving"},
    {"teachers"},
    {"rollouts"},
    {"evals"},
    {"objective"},
    {"memory", "export"},
    {"training"},
    {"report", "migrate", "dry_run", "generation"},
    {"preview", "doctor"},
    {"potstill"},  # the package's own __init__
    {"cli"},
    {"__main__"},  # `python -m potstill`
]
LEVEL = {room: level for level, rooms in enumerate(ORDER) for room in rooms}
ROOM_LINES, FILE_LINES = 2500, 700  # a file is as long as its subject
ROOMS_WITHIN = ("losses/kernels",)  # has a size of its own: a second way of what the room around it does
PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
PICKLING_CALLS = {"torch.load", "torch.save", "np.load", "numpy.load"}
PICKLED_FORMATS = {"FileSystemReader", "FileSystemWriter", "checkpoint_id"}  # torch.distributed.checkpoint's own format
# Words that were ours alone, each as the exact pattern in which it stood; an ordinary use of a word does not count.
OLD_NAMES = [
    r"^\s*policy: ", r"\bpolicy\.(on_policy|sampling|engine|num_generations|max_staleness)", r"\bPolicyConfig\b",
    r"\bteacher_writes\b", r"\bacross(:|=|\.method)", r"\bAcrossConfig\b", r"method: (spelled|shared|chunk)\b",
    r"[\"`](spelled|shared)[\"`](?!,? /)", r"\bloss\.(several|confidence)\b", r"^\s*several: (sum|average|best)",
    r"\bteachers\[\]\.(only|prompt)\b", r"kind: chosen\b", r"[\"`]chosen[\"`]", r"\bstore\.(rest|draws)\b", r"--(rest|draws)\b",
    r"\bname_on_server\b", r"\bremote\.(patience|token)\b", r"\btrain\.clip\b", r"\blr_schedule\.(floor|warmup)\b(?!_)",
    r"\bFaculty\b", r"class (Shelf|Shelved|Scribe|Origin|Asking|Draft|Window|Written|Ask)\b",
    r"class (Knobs|Columns|Pairing|Lexicon|Spelling|Speller)\b",
    r"def (lacks|complete|ask|tend|settle|lacking)\(", r"\bby_draws\b", r"\bsampled_reverse_kl\b", r"\.masses\b",
    r"\bbehaviour_gap\b", r"\brollout_(cut|eos)\b", r"\bown_(texts|reverse_kl|forward_kl|distinct)", r"resume(:|=) ?anyway\b",
    r"sources(\[\d?\]|\.\d)\.share\b",
    r"^#+ (Text that is written|Who writes|By the tokens the student drew|A sliced vocabulary|No mass)$",
    r"^#+ (Who may import whom|Two tokenizers)$",
]  # fmt: skip
THIS = {"tools/check_house.py", "tests/unit/test_house.py", "CHANGELOG.md"}


def room_of(path: Path, source: Path) -> str:
    """`src/potstill/data/layout.py` is in the room `data`."""
    parts = path.relative_to(source).with_suffix("").parts
    return "potstill" if parts == ("__init__",) else parts[0]


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every module a file imports, wherever in it, with the line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:  # `from potstill import data` is an import of potstill.data
                inside = node.module == "potstill" and alias.name in LEVEL
                yield node.lineno, f"potstill.{alias.name}" if inside else "." * node.level + (node.module or "")


def layering(path: Path, source: Path) -> Iterator[str]:
    ours = room_of(path, source)
    if ours not in LEVEL:
        yield f"{path}: {ours} is a new room: give it a line in ORDER of tools/check_house.py"
        return
    for line, module in imported(ast.parse(path.read_text(encoding="utf-8"))):
        parts = module.split(".")
        theirs = parts[1] if len(parts) > 1 else parts[0]
        if module.startswith("."):
            yield f"{path}:{line}: imports are written in full"
        elif parts[0] == "potstill" and theirs != ours and LEVEL[theirs] >= LEVEL[ours]:
            yield f"{path}:{line}: {ours} imports {theirs}, which comes after it"


def no_pickle(path: Path) -> Iterator[str]:
    """Nor what is pickle inside: a file from outside could run code."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    found = {module.split(".")[0] for _, module in imported(tree)} & PICKLES
    found |= {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)} & PICKLING_CALLS
    found |= set(re.findall(r"\w+", text)) & PICKLED_FORMATS
    yield from (f"{path}: {what} reads or writes pickles" for what in sorted(found))


def sizes(source: Path) -> Iterator[str]:
    rooms: dict[str, int] = {}
    for path in source.rglob("*.py"):
        lines = len(path.read_text(encoding="utf-8").splitlines())
        room = room_of(path, source)
        room = next((own for own in ROOMS_WITHIN if path.is_relative_to(source / own)), room)
        rooms[room] = rooms.get(room, 0) + lines
        if lines > FILE_LINES:
            yield f"{path}: {lines} lines, and a file has at most {FILE_LINES}"
    yield from (
        f"{source / room}: {lines} lines, and a room has at most {ROOM_LINES}"
        for room, lines in rooms.items()
        if lines > ROOM_LINES
    )


def no_path_of_one_machine(path: Path) -> Iterator[str]:
    """What a newcomer reads names no folder of the machine it was written on."""
    if found := re.search(r"(?<![\w.*])/(home|Users|root|work|tmp)/", path.read_text(encoding="utf-8")):
        yield f"{path}: names {found[0]}, a folder of one machine"


def old_names(path: Path) -> Iterator[str]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        for pattern in OLD_NAMES:
            if found := re.search(pattern, line):
                yield f"{path}:{number}: {found[0].strip()!r} has another name now"


def links(document: Path) -> Iterator[str]:
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        name, _, anchor = target.partition("#")
        file = document.parent / name if name else document
        if re.match(r"[a-z]+:", target):
            continue
        if not file.exists():
            yield f"{document}: {target} leads nowhere"
        elif anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.M)
            if anchor not in {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}:
                yield f"{document}: {target} names no heading"


def readme_tree(readme: Path, source: Path) -> Iterator[str]:
    tree = re.search(r"^```text\n(.*?)^```", readme.read_text(encoding="utf-8"), re.M | re.S)
    if tree is None:
        yield f"{readme}: there is no tree"
        return
    shown, folders = set(), [readme.parent]
    for line in tree[1].splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        path = folders[depth] / line.split()[0]
        if not path.exists():
            yield f"{readme}: the tree shows {path.relative_to(readme.parent)}, which is not there"
        folders = [*folders[: depth + 1], path]
        shown.add(path)
    rooms = {p for p in source.iterdir() if p.suffix == ".py" or (p.is_dir() and p.name != "__pycache__")}
    yield from (f"{readme}: the tree leaves out {path.name}" for path in sorted(rooms - shown))


def breaches(root: Path, files: Iterable[Path]) -> Iterator[str]:
    source = root / "src" / "potstill"
    yield from sizes(source)
    yield from readme_tree(root / "README.md", source)
    for path in files:
        name = path.relative_to(root).as_posix()
        in_source, is_doc = path.is_relative_to(source), path.suffix == ".md"
        if in_source and path.suffix == ".py":
            yield from layering(path, source)
            yield from no_pickle(path)
        if in_source or is_doc or name.startswith("recipes/"):
            yield from no_path_of_one_machine(path)
        if is_doc:
            yield from links(path)
        if name not in THIS:
            yield from old_names(path)


def main() -> int:
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    names = listed.stdout.split() if listed.returncode == 0 else [str(p.relative_to(ROOT)) for p in ROOT.rglob("*")]
    kinds, left_out = (".py", ".md", ".yaml"), ("runs", ".venv", ".venv-vllm", ".git")
    files = [ROOT / name for name in names if name.endswith(kinds) and name.split("/")[0] not in left_out]
    found = list(breaches(ROOT, sorted(path for path in files if path.is_file())))
    print("\n".join(found) if found else f"{len(files)} files keep the house rules")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
