"""Every setting of the server, declared once: its flag, its environment variable and its help."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from types import NoneType
from typing import Any, NewType, NoReturn, get_args, get_type_hints

from base_engine.config import EngineConfig

#: A number of bytes; written as `512MiB`, `2GB` or plain digits.
ByteSize = NewType("ByteSize", int)

ENV_PREFIX = "LORIKEET_"

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{letter}iB": 1 << (10 * (i + 1)) for i, letter in enumerate("KMGT")}
_UNITS |= {f"{letter}B": 1000 ** (i + 1) for i, letter in enumerate("KMGT")}
_UNITS_LOWER = {unit.lower(): factor for unit, factor in _UNITS.items()}


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """A sentence for each variable that looks like a setting of ours but is none."""
    known = [ENV_PREFIX + item.name.upper() for item in fields(Settings)]
    unknown = sorted(v for v in environ if v.startswith(ENV_PREFIX) and v not in known)
    return [f"{variable} is no setting{_nearest(variable, known)}" for variable in unknown]


class SettingsError(ValueError):
    """A setting has a value that cannot be used; the message names both and the limit."""


def parse_size(text: str) -> ByteSize:
    """`"512MiB"` -> 536870912. Raises ValueError when the text is no size."""
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,6})?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS_LOWER:
        raise ValueError(f"{text!r} is not a size such as 512MiB, 2GB or 1048576")
    return ByteSize(int(float(match[1]) * _UNITS_LOWER[match[2].lower()]))


def _setting(
    default: Any,
    help: str,
    *,
    low: int | None = None,
    high: int | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    metadata = dict(help=help, low=low, high=high, choices=choices)
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def _default_data() -> Path:
    home = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(home).expanduser() / "lorikeet"


@dataclass(frozen=True)
class Settings:
    """How one server runs. Raises SettingsError for values outside their limits.

    A flag wins over its environment variable, which wins over the default.
    """

    model: str = _setting(
        "HuggingFaceTB/SmolLM2-135M-Instruct", "base model: a Hugging Face id or a folder"
    )
    model_name: str | None = _setting(
        None, "public name of the base (default: the id, or the folder's name)"
    )
    host: str = _setting("127.0.0.1", "address to listen on")
    port: int = _setting(8000, "port to listen on; 0 takes a free one", low=0, high=65535)
    data: Path = _setting(
        _default_data, "folder for adapters and records (default: lorikeet in the XDG data home)"
    )
    redis: str | None = _setting(
        None, "redis:// or unix:// address of the record store (default: an embedded server)"
    )
    seed_adapters: Path | None = _setting(
        None, "folder of adapter folders, uploaded once when first seen"
    )
    device: str = _setting("cpu", "device of the base, such as cpu or cuda:0")
    dtype: str = _setting(
        "float32", "type of the base's weights", choices=("float32", "bfloat16", "float16")
    )
    kv_memory: ByteSize = _setting(1 << 30, "memory for the KV cache", low=1 << 16)
    adapter_memory: ByteSize = _setting(
        512 << 20, "device memory for resident adapters", low=1 << 12
    )
    host_adapter_memory: ByteSize = _setting(
        1 << 30, "host memory for cached adapters", low=1 << 12
    )
    max_upload: ByteSize = _setting(1 << 30, "largest upload, also unpacked", low=1 << 10)
    max_body: ByteSize = _setting(4 << 20, "largest JSON body", low=1 << 10)
    max_rank: int = _setting(256, "largest LoRA rank taken", low=1, high=4096)
    adapter_tokenizers: str | None = _setting(
        None,
        "tenants whose uploads may bring added tokens and a chat template, or * for all; without "
        "authentication there is one, called default",
    )
    max_running: int = _setting(32, "sequences generated at once", low=1, high=4096)
    max_waiting: int = _setting(256, "sequences queued before 429", low=1, high=1 << 16)
    step_tokens: int = _setting(256, "tokens in one forward pass", low=1, high=1 << 16)
    prefix_cache: bool = _setting(True, "reuse the KV cache of equal prompt beginnings")
    stall_seconds: int = _setting(
        60, "seconds without a step, work pending, until /live fails", low=1, high=86400
    )
    write_timeout: int = _setting(
        60, "seconds a stream may wait for a client that does not read", low=1, high=86400
    )
    log_requests: bool = _setting(True, "log a line per request, without its content")

    def __post_init__(self) -> None:
        for item in fields(self):
            _check(item.name, getattr(self, item.name), item.metadata)
        if re.fullmatch(r"cpu|cuda(:\d+)?", self.device) is None:
            raise SettingsError(f"--device: {self.device!r} is not cpu, cuda or cuda:N")
        if self.redis and not self.redis.startswith(("redis://", "rediss://", "unix://")):
            raise SettingsError(
                "--redis: the address must start with redis://, rediss:// or unix://"
            )
        if not self.model:
            raise SettingsError("--model: must not be empty")

    @classmethod
    def from_args(
        cls, argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None
    ) -> Settings:
        """Settings from flags, then environment; exits with a message on a bad value (argparse)."""
        environ = os.environ if environ is None else environ
        parser = _parser(cls)
        try:
            values = _from_environment(cls, environ)
            values.update(vars(parser.parse_args(argv)))
            return cls(**values)
        except SettingsError as error:
            parser.error(str(error))

    @property
    def public_name(self) -> str:
        """The base's name for clients."""
        if self.model_name:
            return self.model_name
        return Path(self.model).resolve().name if Path(self.model).is_dir() else self.model

    def may_bring_tokenizer(self, tenant: str) -> bool:
        """Whether added tokens and chat templates in the tenant's uploads are used."""
        allowed = [name.strip() for name in (self.adapter_tokenizers or "").split(",")]
        return "*" in allowed or tenant in allowed

    def engine_config(self) -> EngineConfig:
        return EngineConfig(
            device=self.device,
            dtype=self.dtype,
            kv_bytes=self.kv_memory,
            adapter_bytes=self.adapter_memory,
            host_adapter_bytes=self.host_adapter_memory,
            step_tokens=self.step_tokens,
            max_running=self.max_running,
            max_waiting=self.max_waiting,
            prefix_cache=self.prefix_cache,
        )


def _check(name: str, value: Any, metadata: Mapping[str, Any]) -> None:
    name = _flag(name)
    low, high, choices = metadata["low"], metadata["high"], metadata["choices"]
    if low is not None and value < low:
        raise SettingsError(f"{name}: {value} is below the least, {low}")
    if high is not None and value > high:
        raise SettingsError(f"{name}: {value} is above the largest, {high}")
    if choices and value not in choices:
        raise SettingsError(f"{name}: {value!r} is not one of {', '.join(choices)}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _parse_bool(text: str) -> bool:
    known = {"1": True, "true": True, "yes": True, "on": True}
    known |= {"0": False, "false": False, "no": False, "off": False}
    if text.lower() not in known:
        raise ValueError(f"{text!r} is not true or false")
    return known[text.lower()]


def _parse_int(text: str) -> int:
    if re.fullmatch(r"\s*-?\d{1,18}\s*", text) is None:
        raise ValueError(f"{text!r} is not a whole number")
    return int(text)


def _parse_path(text: str) -> Path:
    return Path(text).expanduser()


_PARSERS: dict[Any, Callable[[str], Any]] = {
    str: str,
    int: _parse_int,
    bool: _parse_bool,
    Path: _parse_path,
    ByteSize: parse_size,
}


def _nearest(variable: str, known: Sequence[str]) -> str:
    close = get_close_matches(variable, known, n=1, cutoff=0)
    return f"; did you mean {close[0]}?" if close else ""


def _types(cls: type[Settings]) -> dict[str, Any]:
    """Field name -> its type without `| None`."""
    hints = get_type_hints(cls)
    plain = {}
    for item in fields(cls):
        options = [t for t in get_args(hints[item.name]) if t is not NoneType]
        plain[item.name] = options[0] if options else hints[item.name]
    return plain


class _Parser(argparse.ArgumentParser):
    """argparse with one line for a bad argument instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message.removeprefix('argument ')} (see {self.prog} --help)\n")


def _parser(cls: type[Settings]) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="serve",
        description="Serve many LoRA adapters from one resident base model.",
        epilog=f"Each flag can be set as {ENV_PREFIX}<NAME> too, such as {ENV_PREFIX}PORT=8080.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    types = _types(cls)
    for item in fields(cls):
        flag = _flag(item.name)
        help_text = item.metadata["help"] + _default_text(types[item.name], item.default)
        if types[item.name] is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, help=help_text)
            continue
        parse = _PARSERS[types[item.name]]
        parser.add_argument(
            flag,
            type=_argument(parse),
            help=help_text,
            metavar="|".join(item.metadata["choices"]) or _METAVARS[types[item.name]],
        )
    return parser


_METAVARS: dict[Any, str] = {str: "TEXT", int: "N", Path: "FOLDER", ByteSize: "SIZE"}


def _argument(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    def argument(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return argument


def _default_text(kind: Any, default: Any) -> str:
    if default is None or default is MISSING:
        return ""
    if kind is ByteSize:
        unit = next(u for u in ("GiB", "MiB", "KiB", "B") if default % _UNITS[u] == 0)
        default = f"{default // _UNITS[unit]}{unit}"
    return f" (default: {default})"


def _from_environment(cls: type[Settings], environ: Mapping[str, str]) -> dict[str, Any]:
    values = {}
    for name, kind in _types(cls).items():
        variable = ENV_PREFIX + name.upper()
        text = environ.get(variable, "")
        if not text:
            continue
        try:
            values[name] = _PARSERS[kind](text)
        except ValueError as error:
            raise SettingsError(f"{variable}: {error}") from None
    return values
