"""Which files of an upload count: an adapter's two and its tokenizer's are read, harmless ones are
ignored, everything else is refused.

The same rules hold for the file parts of a form and for the members of an archive. Names only
ever select; no path is made from them.
"""

from __future__ import annotations

import unicodedata
from dataclasses import replace

from adapters import errors
from adapters.errors import Violation
from adapters.foreign import MLX_WEIGHTS_FILE
from adapters.manifest import CONFIG_FILE, WEIGHTS_FILE
from adapters.tokenizer_files import TOKENIZER_FILES

MAX_MEMBERS = 1000
MAX_NAME = 1024

_EITHER = f"{WEIGHTS_FILE} and {MLX_WEIGHTS_FILE}"

_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".safetensors", ".gguf", ".npz", ".npy", ".pkl", ".h5")
_ARCHIVES = (".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".zst", ".7z", ".rar")
#: Has a weights file's ending but holds none: what peft's trainers write beside an adapter.
_HARMLESS = ("training_args.bin",)
#: Ignored reports are cut to this many names.
_NAMED = 10
#: Control and format characters (bidi marks), line and paragraph ends, private use, surrogates.
_UNSEEN = frozenset(("Cc", "Cf", "Zl", "Zp", "Co", "Cs"))


class Members:
    """Judges the names of one upload, one after the other, and remembers what it found.

    `wanted` holds which of the adapter's files and its tokenizer's came; `violations` why the
    upload is refused.
    """

    def __init__(self) -> None:
        self.wanted: set[str] = set()
        self.violations: list[Violation] = []
        self._ignored: list[str] = []
        self._folders: set[str] = set()
        #: Tokenizer file -> the folder that it came from.
        self._tokenizer: dict[str, str] = {}
        self._seen: set[str] = set()

    def select(self, name: str) -> str | None:
        """The file of an adapter or its tokenizer that the member `name` holds, or None when it is
        not to be read.

        Where the adapter's folder is not known yet, a tokenizer file of another one may be taken;
        it is among `misplaced` in the end.
        """
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
        if violation.code != "missing_file" or not self._all_ignored():
            return violation
        message = f"{violation.message}; sent were {self._ignored_names()}, which are not read"
        return replace(violation, message=message)

    @property
    def misplaced(self) -> tuple[str, ...]:
        """The tokenizer files that were taken from another folder than the adapter's, as far as is
        known by now: they are to be deleted."""
        return tuple(
            name
            for name, folder in self._tokenizer.items()
            if self._folders and folder not in self._folders
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was ignored, in words for the answer."""
        if not self._all_ignored():
            return ()
        return (f"ignored files that are not part of the adapter: {self._ignored_names()}",)

    def _all_ignored(self) -> list[str]:
        places = ((self._tokenizer[name], name) for name in self.misplaced)
        found = [printable(f"{folder}/{name}" if folder else name) for folder, name in places]
        return found + self._ignored

    def _ignored_names(self) -> str:
        names = self._all_ignored()
        rest = len(names) - _NAMED
        return ", ".join(names[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")

    def _select(self, name: str, folder: str, base: str) -> str | None:
        lower = base.lower()
        if base in (CONFIG_FILE, WEIGHTS_FILE, MLX_WEIGHTS_FILE):
            if base != CONFIG_FILE and self.wanted & ({WEIGHTS_FILE, MLX_WEIGHTS_FILE} - {base}):
                message = f"is a second weights file; only one of {_EITHER} is read"
                self.refuse("unexpected_weights", name, message)
                return None
            if "/" in folder or base in self.wanted:
                message = "lies in a sub-folder; one set of adapter files in one folder is taken"
                self.refuse("sub_folder", name, message)
                return None
            self._folders.add(folder)
            self.wanted.add(base)
            return base
        if base in TOKENIZER_FILES and "/" not in folder and base not in self.wanted:
            if not self._folders or folder in self._folders:
                self._tokenizer[base] = folder
                self.wanted.add(base)
                return base
        if lower.endswith(_WEIGHTS) and lower not in _HARMLESS:
            message = f"is a second weights file; only {WEIGHTS_FILE} is read"
            if lower == "adapter_model.bin":
                message = (
                    f"is a pickle, which may run anything when it is loaded; scripts/check_adapter "
                    f"FOLDER --convert writes it as {WEIGHTS_FILE} without running it: send that "
                    "alone"
                )
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
    escaped = errors.printable(name)
    return escaped if len(escaped) <= 100 else escaped[:97] + "..."


def _path_problem(name: str) -> str | None:
    """Why `name` is no plain relative path, or None when it is one."""
    if not name or len(name) > MAX_NAME:
        return f"has a name of {len(name)} characters; 1 to {MAX_NAME} are taken"
    if any(unicodedata.category(c) in _UNSEEN for c in name):
        return "has control characters or invisible marks in its name"
    if "\\" in name:
        return "has a backslash in its name"
    if name.startswith("/") or name[1:2] == ":":
        return "has an absolute name"
    if any(part in ("..", "") for part in name.split("/")):
        return "has a name that leads out of its folder or holds an empty part"
    return None
