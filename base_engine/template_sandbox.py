"""The program in which a chat template that is not trusted is rendered.

`base_engine.template_process` starts it for one template, with nothing but two pipes; it needs
jinja2 alone. Frames on both pipes are a length (4 bytes, big-endian) and JSON: first the limits,
answered by null once they are in force, then {"template", "variables"} each time, answered by
{"text"}, {"error"}, or {"limit"} after which it ends.
"""

from __future__ import annotations

import json
import math
import os
import resource
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import Any, BinaryIO

import jinja2.debug  # noqa: F401 (an error would import it, too late)
from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


def read_frame(pipe: BinaryIO) -> Any:
    """The next value; raises EOFError at the end."""
    head = pipe.read(4)
    if len(head) < 4:
        raise EOFError
    return json.loads(pipe.read(struct.unpack(">I", head)[0]))


def frame(value: Any) -> bytes:
    """`value` as it goes through a pipe."""
    data = json.dumps(value).encode()
    return struct.pack(">I", len(data)) + data


def main() -> None:
    """Answer frames from standard input until it ends."""
    compiled = lru_cache(maxsize=1)(_environment().from_string)
    limits = read_frame(sys.stdin.buffer)
    _limit_memory_and_files(limits["memory"])
    _send(None)
    with suppress(EOFError):
        while True:
            asked = read_frame(sys.stdin.buffer)
            _limit_time(limits["seconds"])
            try:
                answer = {"text": _text(compiled(asked["template"]), asked, limits["output"])}
            except MemoryError:
                answer = {"limit": "memory"}
            except _TooLong:
                answer = {"limit": "output"}
            except Exception as error:
                answer = {"error": str(error)[:1000] or type(error).__name__}
            _send(answer)
            if "limit" in answer:
                return


class _TooLong(Exception):
    """The output is over its limit."""


def _text(template: Template, asked: dict[str, Any], most: int) -> str:
    parts: list[str] = []
    for part in template.generate(asked["variables"]):
        most -= len(part.encode())
        if most < 0:
            raise _TooLong
        parts.append(part)
    return "".join(parts)


def _send(value: Any) -> None:
    sys.stdout.buffer.write(frame(value))
    sys.stdout.buffer.flush()


def _limit_memory_and_files(memory: int) -> None:
    time.localtime()  # reads the time zone's file
    os.chdir("/")
    kinds = {
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        # The two pipes, standard error, and one more for a module that jinja2 imports late.
        resource.RLIMIT_NOFILE: 4,
        resource.RLIMIT_NPROC: 0,
    }
    for kind, most in kinds.items():
        # Not every system has every limit (macOS: no limit on memory).
        with suppress(ValueError, OSError):
            resource.setrlimit(kind, (most, most))


def _limit_time(seconds: float) -> None:
    """End this process after `seconds` more of CPU time, whoever started it being gone or not."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = math.ceil(time.process_time() + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja as transformers sets it up for chat templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=lambda format: datetime.now().strftime(format),
        dict=_PlainDict(),
        namespace=_PlainNamespace,
    )
    return environment


class _Generation(Extension):
    """{% generation %} marks what the assistant says; it changes nothing in the text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

    def _said(self, caller: Callable[[], str]) -> str:
        return caller()


class _PlainNamespace(Namespace):
    """Without names that begin with an underscore."""

    # No name for the first argument: a namespace may hold one called self.
    def __init__(*args: Any, **kwargs: Any) -> None:
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class _PlainDict:
    """What templates may do with `dict`."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}: it begins with an underscore")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As JSON, without the escapes for HTML that jinja's own filter makes."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
