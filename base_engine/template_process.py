"""Chat templates that are not trusted, each rendered in a process of its own under limits.

Jinja's sandbox keeps a template from running code, not from working: loops in loops never end, and
one multiplication can ask for gigabytes. So the process may take only so much time, memory and
output, has no open files but its pipes, and is thrown away when it oversteps. A process serves one
template in its life, so no template ever shares memory with another's conversations.
"""

from __future__ import annotations

import os
import select
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import markupsafe
import msgspec

from base_engine.template_sandbox import frame


class ChatTemplateError(Exception):
    """The chat template refuses these messages; the text is the template's own message, or says
    which limit it oversteps."""


class ChatTemplateBusy(ChatTemplateError):
    """There is no time to render the template now; it may be tried again."""


@dataclass(frozen=True)
class TemplateLimits:
    """What one render may take: wall-clock `seconds`, `memory` of its process and `output` in
    bytes."""

    seconds: float = 2.0
    memory: int = 256 << 20
    output: int = 4 << 20


class TemplateRenderer:
    """Keeps up to `processes` processes warm, each with its template; starts them when asked.

    Thread-safe; each render blocks its thread. Renders of one template take turns, so one that
    hangs takes up one process. `close` ends them all, as does the end of this process, however it
    comes.
    """

    def __init__(self, limits: TemplateLimits = TemplateLimits(), processes: int = 8) -> None:
        self.limits = limits
        self._most = processes
        self._idle: OrderedDict[str, _Process] = OrderedDict()
        self._busy: set[str] = set()
        self._overstepped: dict[str, _Strikes] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._finalizer = weakref.finalize(self, _end_all, self._idle)

    def render(
        self, template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, str]
    ) -> str:
        """The prompt that ends where the assistant begins to speak; `variables` holds the special
        tokens by name. Equals what transformers' `apply_chat_template` gives.

        Raises ChatTemplateError.
        """
        asked = {
            "template": template,
            "variables": {
                "messages": [_plain(message) for message in messages],
                "tools": None,
                "documents": None,
                "add_generation_prompt": True,
                **variables,
            },
        }
        with self._process(template) as process:
            return process.ask(asked)

    def close(self) -> None:
        """End all processes; nothing is rendered any more."""
        with self._changed:
            self._closed = True
            self._finalizer()
            self._changed.notify_all()

    @contextmanager
    def _process(self, template: str) -> Iterator[_Process]:
        process = self._take(template)
        try:
            if process is None:
                process = _Process(self.limits)
            yield process
        except _Overstepped:
            self._strike(template)
            raise
        finally:
            self._give(template, process)

    def _take(self, template: str) -> _Process | None:
        """The idle process of `template`, None where one is to be started in its place."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or self._rests(template) or self._has_room(template),
                self.limits.seconds,
            )
            if self._closed:
                raise ChatTemplateError("the server is stopping")
            if self._rests(template):
                raise ChatTemplateBusy(
                    "overstepped its limits several times just now; it is tried again in a while"
                )
            if not self._has_room(template):
                raise ChatTemplateBusy("waited too long for other chat templates to be rendered")
            self._busy.add(template)
            process = self._idle.pop(template, None)
            if process is None and len(self._idle) + len(self._busy) > self._most:
                self._idle.popitem(last=False)[1].end()
            return process

    def _has_room(self, template: str) -> bool:
        return template not in self._busy and len(self._busy) < self._most

    def _rests(self, template: str) -> bool:
        strikes = self._overstepped.get(template)
        return strikes is not None and time.monotonic() < strikes.rests_until

    def _strike(self, template: str) -> None:
        with self._changed:
            strikes = self._overstepped.pop(template, _Strikes())
            self._overstepped[template] = strikes.another(self.limits.seconds)
            while len(self._overstepped) > _REMEMBERED:
                self._overstepped.pop(next(iter(self._overstepped)))

    def _give(self, template: str, process: _Process | None) -> None:
        with self._changed:
            self._busy.discard(template)
            if process is not None and process.usable and not self._closed:
                self._idle[template] = process
                self._overstepped.pop(template, None)
            elif process is not None:
                process.end()
            self._changed.notify_all()


def check_template(
    template: str,
    variables: Mapping[str, str] | None = None,
    limits: TemplateLimits = TemplateLimits(),
) -> None:
    """Render a simple conversation, with and without a system prompt, in a process of its own.

    `variables` are the special tokens by name. Raises ChatTemplateError where the template has a
    syntax error, fails on every such conversation, oversteps a limit or gives no text.
    """
    renderer = TemplateRenderer(limits, processes=1)
    named = {"bos_token": "<s>", "eos_token": "</s>"} if variables is None else variables
    try:
        failure = None
        for messages in _PROBES:
            try:
                if renderer.render(template, messages, named).strip():
                    return
            except _Overstepped:
                raise
            except ChatTemplateError as error:
                failure = failure or error
        raise failure or ChatTemplateError("gives no text for a simple conversation")
    finally:
        renderer.close()


_PROBES = (
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
)
#: Another name of a message's reasoning -> filled from whichever comes first in this order.
_REASONING = ("reasoning_content", "thinking", "reasoning")
#: Templates that overstepped their limits and are remembered for it.
_REMEMBERED = 100
#: Renders after which a process is replaced, and seconds that one may take to start.
_MOST_RENDERS = 10_000
_START_SECONDS = 30.0


class _Overstepped(ChatTemplateError):
    """A limit was hit; the process is gone."""


@dataclass(frozen=True)
class _Strikes:
    """How often in a row a template overstepped, and until when it is not tried again.

    The first time may be one odd conversation, so only the next ones cost a rest.
    """

    count: int = 0
    rests_until: float = 0.0

    def another(self, seconds: float) -> _Strikes:
        rest = 5 * seconds if self.count else 0.0
        return _Strikes(self.count + 1, time.monotonic() + rest)


class _Process:
    """One sandbox process; raises ChatTemplateError where it cannot be started."""

    def __init__(self, limits: TemplateLimits) -> None:
        self._limits = limits
        self._renders = 0
        self.usable = True
        packages = (jinja2.__file__, markupsafe.__file__, __file__)
        folders = {str(Path(file).resolve().parent.parent) for file in packages}
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", "-X", "utf8", "-c", _PROGRAM),
                *sorted(folders),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in _KEPT if name in os.environ},
            bufsize=0,
            # A Ctrl-C in the terminal is for the server, which ends this process in its turn.
            start_new_session=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._to, self._from = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._to, False)
        os.set_blocking(self._from, False)
        wanted = {"seconds": limits.seconds, "memory": limits.memory, "output": limits.output}
        try:
            self._exchange(wanted, _START_SECONDS)
        except (OSError, EOFError, TimeoutError, ValueError) as error:
            self.end()
            raise ChatTemplateError("the process for chat templates does not start") from error

    def ask(self, request: Mapping[str, Any]) -> str:
        """The text of a render. Raises ChatTemplateError; the process may be unusable then."""
        self._renders += 1
        answer: Any = None
        reason = "ended the process that renders it"
        try:
            answer = self._exchange(request, self._limits.seconds)
        except TimeoutError:
            reason = f"takes longer than {self._limits.seconds:g} s"
        except (OSError, EOFError, ValueError):
            pass  # it crashed, or was killed for its CPU time
        match answer:
            case {"text": str(text)}:
                self.usable = self._renders < _MOST_RENDERS
                return text
            case {"error": str(message)}:
                self.usable = self._renders < _MOST_RENDERS
                raise ChatTemplateError(message)
            case {"limit": "memory"}:
                reason = f"takes more than {self._limits.memory >> 20} MiB of memory"
            case {"limit": "output"}:
                reason = f"gives more than {self._limits.output} bytes"
        self.end()
        raise _Overstepped(f"the chat template {reason}")

    def end(self) -> None:
        self.usable = False
        self._process.kill()
        with self._process:  # closes the pipes and waits
            pass

    def _exchange(self, request: Mapping[str, Any], seconds: float) -> Any:
        """Send `request`, return the answer. Raises TimeoutError, EOFError, OSError, ValueError."""
        deadline = time.monotonic() + seconds
        data = memoryview(frame(request))
        while data:
            _wait(self._to, select.POLLOUT, deadline)
            data = data[os.write(self._to, data) :]
        (length,) = struct.unpack(">I", self._read(4, deadline))
        # JSON spells a byte of text with at most six.
        if length > 6 * self._limits.output + 10_000:
            raise ValueError
        return msgspec.json.decode(self._read(length, deadline))

    def _read(self, size: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            _wait(self._from, select.POLLIN, deadline)
            piece = os.read(self._from, min(size - len(data), 1 << 20))
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)


#: Started in isolation, without site-packages: it is told where its few modules lie.
_PROGRAM = (
    "import sys; sys.path += sys.argv[1:]; from base_engine.template_sandbox import main; main()"
)
#: What the process gets of the environment: where libraries lie, and the time zone.
_KEPT = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TZ")


def _wait(fd: int, event: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(fd, event)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without fields that are None, its reasoning under the names templates read."""
    plain = {name: value for name, value in message.items() if value is not None}
    reasoning = next((plain[name] for name in _REASONING if name in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


def _end_all(idle: OrderedDict[str, _Process]) -> None:
    while idle:
        idle.popitem()[1].end()
