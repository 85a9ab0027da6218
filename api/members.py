"""Which files of an upload count: two are read, harmless ones ignored, everything else refused.

The same rules hold for the file parts of a form and for the members of an archive. Names only
ever select; no path is made from them.
"""

from __future__ import annotations

from dataclasses import replace

from adapters.errors import Violation
from adapters.manifest import CONFIG_FILE, WEIGHTS_FILE

MAX_MEMBERS = 1000
MAX_NAME = 1024

_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".safetensors", ".gguf", ".npz", ".npy", ".pkl", ".h5")
_ARCHIVES = (".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".zst", ".7z", ".rar")
#: Has a weights file's ending but holds none: what peft's trainers write beside an adapter.
_HARMLESS = ("training_args.bin",)
#: Ignored reports are cut to this many names.
_NAMED = 10


class Members:
    """Judges the names of one upload, one after the other, and remembers what it found.

    `wanted` holds which of the two adapter files came; `violations` why the upload is refused.
    """

    def __init__(self) -> None:
        self.wanted: set[str] = set()
        self.violations: list[Violation] = []
        self._ignored: list[str] = []
        self._folders: set[str] = set()
        self._seen: set[str] = set()

    def select(self, name: str) -> str | None:
        """The adapter file that the member `name` holds, or None when it is not to be read."""
        if len(self._seen) >= MAX_MEMBERS:
            self._too_many()
            return None
        problem = _path_problem(name)
        if problem is not None:
            self.refuse("unsafe_name", name, problem)
            return None
        folder, _, base = name.removeprefix("./").rpartition("/")
        if folder.split("/")[0] == "__MACOSX" or base == ".DS_Store":
            return None
        if name.removeprefix("./") in self._seen:
            self.refuse("duplicate_file", name, "comes twice; one file of each name is taken")
            return None
        self._seen.add(name.removeprefix("./"))
        return self._select(name, folder, base)

    def refuse(self, code: str, name: str, message: str) -> None:
        """Note that the upload is refused because of its member `name`."""
        if len(self.violations) < MAX_MEMBERS:
            self.violations.append(Violation(code, printable(name), message))

    def finish(self) -> None:
        """Call after the last name: the adapter files must have come from one folder.

        That both came is for `adapters.validation` to check.
        """
        if len(self._folders) > 1:
            folders = ", ".join(repr(printable(folder)) for folder in sorted(self._folders)[:3])
            message = f"the adapter files must lie in one folder; found them in {folders}"
            self.refuse("several_folders", "upload", message)

    def explained(self, violation: Violation) -> Violation:
        """`violation`, with the names of what was sent instead if it is that a file is missing."""
        if violation.code != "missing_file" or not self._ignored:
            return violation
        message = f"{violation.message}; sent were {self._ignored_names()}, which are not read"
        return replace(violation, message=message)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was ignored, in words for the answer."""
        if not self._ignored:
            return ()
        return (f"ignored files that are not part of the adapter: {self._ignored_names()}",)

    def _ignored_names(self) -> str:
        rest = len(self._ignored) - _NAMED
        return ", ".join(self._ignored[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")

    def _select(self, name: str, folder: str, base: str) -> str | None:
        lower = base.lower()
        if base in (CONFIG_FILE, WEIGHTS_FILE):
            if "/" in folder or base in self.wanted:
                message = "lies in a sub-folder; one set of adapter files in one folder is taken"
                self.refuse("sub_folder", name, message)
                return None
            self._folders.add(folder)
            self.wanted.add(base)
            return base
        if lower.endswith(_WEIGHTS) and lower not in _HARMLESS:
            message = f"is a second weights file; only {WEIGHTS_FILE} is read"
            if lower == "adapter_model.bin":
                message = f"is a pickle; convert it to safetensors and upload {WEIGHTS_FILE}"
            self.refuse("unexpected_weights", name, message)
        elif is_archive(base):
            self.refuse("nested_archive", name, "is an archive; archives inside are not opened")
        else:
            self._ignored.append(printable(name))
        return None

    def _too_many(self) -> None:
        if all(violation.code != "too_many_files" for violation in self.violations):
            message = f"holds more than {MAX_MEMBERS} files"
            self.refuse("too_many_files", "upload", message)


def is_archive(name: str) -> bool:
    """Whether `name` ends like an archive of any kind."""
    return name.lower().endswith(_ARCHIVES)


def printable(name: str) -> str:
    """`name` fit for a message: escaped and cut to 100 characters."""
    escaped = name.encode("unicode_escape").decode("ascii") if not name.isprintable() else name
    return escaped if len(escaped) <= 100 else escaped[:97] + "..."


def _path_problem(name: str) -> str | None:
    """Why `name` is no plain relative path, or None when it is one."""
    if not name or len(name) > MAX_NAME:
        return f"has a name of {len(name)} characters; 1 to {MAX_NAME} are taken"
    if any(ord(c) < 32 or ord(c) == 127 or 0xD800 <= ord(c) < 0xE000 for c in name):
        return "has control characters in its name"
    if "\\" in name:
        return "has a backslash in its name"
    if name.startswith("/") or name[1:2] == ":":
        return "has an absolute name"
    if any(part in ("..", "") for part in name.split("/")):
        return "has a name that leads out of its folder or holds an empty part"
    return None
