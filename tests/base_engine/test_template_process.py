from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from base_engine.template_process import (
    ChatTemplateError,
    TemplateLimits,
    TemplateRenderer,
    check_template,
)
from tests.tiny import CHAT_TEMPLATE, save_tokenizer

HANG = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
SMALL = TemplateLimits(seconds=0.8, memory=96 << 20, output=100_000)
HELLO = [{"role": "user", "content": "Hello"}]
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief — é😀 <b>&'\"</b>"},
    {"role": "user", "content": "  What's 1 < 2?\n"},
    {"role": "assistant", "content": "Yes.", "thinking": "easy", "name": None},
    {"role": "user", "content": "Why?"},
]

LLAMA = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start|>system<|end|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" + system_message + eos_token }}
{%- for message in messages %}
    {{- '<|start|>' + message['role'] + '<|end|>\\n\\n' + message['content'] | trim + eos_token }}
    {{- message | tojson(indent=2) }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|end|>\\n\\n' }}
{%- endif %}
"""
MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("Conversation roles must alternate") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message.role == "user" %}
        {%- if loop.last and system is defined %}
            {{- "[INST] " + system + "\\n\\n" + message.content + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message.content + "[/INST]" }}
        {%- endif %}
    {%- else %}
        {% generation %}{{- " " + message.content|trim + eos_token -}}{% endgeneration %}
    {%- endif %}
    {%- if loop.index > 99 %}{% break %}{% endif %}
{%- endfor %}
"""
REASONING = """
{% for m in messages %}
  {% if m.reasoning_content is defined %}
<think>{{ m.reasoning_content }}</think>
  {% endif %}
  {% if m.name is defined %}named{% endif %}
{{ dict(role=m.role) }} {{ m.content|replace('\\n', ' ')|upper }}{{ unk_token }}|{{ pad_token }}
{% endfor %}
{{ {'z': 1, 'a': [true, none, 1.5]}|tojson(sort_keys=true, separators=(',', ':')) }}
"""


@pytest.fixture(scope="module")
def renderer() -> Iterator[TemplateRenderer]:
    renderer = TemplateRenderer(TemplateLimits(seconds=20))
    yield renderer
    renderer.close()


@pytest.fixture
def small() -> Iterator[TemplateRenderer]:
    renderer = TemplateRenderer(SMALL, processes=3)
    yield renderer
    renderer.close()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.mark.parametrize("chat", [CHAT, CHAT[1:], CHAT[:2], HELLO])
@pytest.mark.parametrize("template", [CHAT_TEMPLATE, LLAMA, MISTRAL, REASONING])
def test_renders_as_transformers_does(
    renderer: TemplateRenderer,
    tokenizer: PreTrainedTokenizerFast,
    template: str,
    chat: list[dict[str, Any]],
) -> None:
    expected = tokenizer.apply_chat_template(
        chat, chat_template=template, tokenize=False, add_generation_prompt=True
    )
    assert renderer.render(template, chat, tokenizer.special_tokens_map) == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (MISTRAL, "^Conversation roles must alternate$"),
        ("{% for", "unexpected"),
        ("{% nothing %}", "unknown tag"),
        ("{{ messages[0].absent.deeper }}", "has no attribute"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ ''|attr('__class__')|attr('__mro__') + 1 }}", "Undefined"),
        ("{{ '{0.__class__.__mro__}'.format(1) }}", "__class__"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{% set x = messages.append(1) %}", "unsafe"),
        ("{{ namespace(__class__=1) }}", "underscore"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{% import '/etc/passwd' as x %}", "no loader"),
        ("{% extends '/etc/passwd' %}", "no loader"),
        ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "recursion"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "recursion"),
        ("{{ range(100000000)|list }}", "Range too big"),
        ("{{ '\ud800' }}", "surrogates"),
        ("{{ raise_exception('x' * 100000) }}", "^x{1000}$"),
    ],
)
def test_what_a_template_raises_is_its_message_and_costs_no_process(
    renderer: TemplateRenderer, template: str, message: str
) -> None:
    messages = [*HELLO, *HELLO]
    with pytest.raises(ChatTemplateError, match=message):
        renderer.render(template, messages, {})
    before = pids(renderer)
    with pytest.raises(ChatTemplateError, match=message):
        renderer.render(template, messages, {})
    assert pids(renderer) == before


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (HANG, "takes longer than 0.8 s"),
        ("{{ lipsum(n=99999999) }}", "takes (longer than 0.8 s|more than 96 MiB of memory)"),
        ("{{ 'a' * 500000000 }}", "takes more than 96 MiB of memory"),
        ("{{ '%0999999999d' % 1 }}", "takes more than 96 MiB of memory"),
        (
            "{% set ns = namespace(x='ab') %}"
            "{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
            "takes (longer than 0.8 s|more than 96 MiB of memory)",
        ),
        ("{{ 'é' * 50001 }}", "gives more than 100000 bytes"),
        ("{% for i in range(99999) %}{{ 'x' * 99 }}{% endfor %}", "gives more than 100000 bytes"),
        ("{{ (7 ** 9999999) ** 99 }}", "takes longer than 0.8 s"),
    ],
)
def test_what_oversteps_a_limit_is_stopped(
    small: TemplateRenderer, template: str, message: str
) -> None:
    assert small.render("hi", HELLO, {}) == "hi"
    before = pids(small)
    started = time.monotonic()
    with pytest.raises(ChatTemplateError, match=f"^the chat template {message}$"):
        small.render(template, HELLO, {})
    assert time.monotonic() - started < 10
    assert pids(small) == before
    assert small.render("hi", HELLO, {}) == "hi"


def test_as_much_as_the_limit_is_given(small: TemplateRenderer) -> None:
    assert small.render("{{ 'é' * 50000 }}", HELLO, {}) == "é" * 50000


def test_a_killed_process_is_replaced(small: TemplateRenderer) -> None:
    template = "{% if messages[0].hang %}" + HANG + "{% endif %}hi"
    small.render(template, HELLO, {})
    (pid,) = pids(small)
    done = threading.Timer(0.1, os.kill, (pid, signal.SIGKILL))
    done.start()
    with pytest.raises(ChatTemplateError, match="ended the process that renders it"):
        small.render(template, [{"hang": True}], {})
    done.join()
    assert small.render(template, HELLO, {}) == "hi"
    assert pids(small) != {pid}


#: Prints the process's id, then waits, busy with a render if an argument says so.
PARENT = f"""
import sys, threading, time
from base_engine.template_process import TemplateLimits, TemplateRenderer
template = "{{% if messages %}}{HANG}{{% endif %}}hi"
renderer = TemplateRenderer(TemplateLimits(seconds=1))
renderer.render(template, [], {{}})
print(renderer._idle[template]._process.pid, flush=True)
if sys.argv[1:]:
    threading.Thread(target=renderer.render, args=(template, [{{}}], {{}})).start()
    time.sleep(0.3)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("arguments", [[], ["busy"]])
def test_no_process_outlives_a_killed_server(arguments: list[str]) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, *arguments], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert parent.stdout.readline() == "ready\n"
        assert state(pid) in "RS"
        parent.kill()
    deadline = time.monotonic() + 20
    while state(pid) not in "ZX":  # an orphan that nobody reaps stays as a zombie
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.05)


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def test_fifty_renders_while_one_hangs(small: TemplateRenderer) -> None:
    small.render("{{ messages[0].content }}", HELLO, {})
    with ThreadPoolExecutor(52) as pool:
        hanging = [pool.submit(small.render, HANG, HELLO, {}) for _ in range(2)]
        texts = [
            pool.submit(small.render, "{{ messages[0].content }}", [{"content": f"{i}"}], {})
            for i in range(50)
        ]
        assert [text.result() for text in texts] == [f"{i}" for i in range(50)]
        assert not all(failure.done() for failure in hanging)
        for failure in hanging:
            with pytest.raises(ChatTemplateError):
                failure.result()


def test_a_template_that_keeps_overstepping_is_left_alone_for_a_while() -> None:
    template = "{% if messages[0].content == 'long' %}" + HANG + "{% endif %}hi"
    long = [{"role": "user", "content": "long"}]
    small = TemplateRenderer(TemplateLimits(seconds=0.4))
    with pytest.raises(ChatTemplateError, match="longer than"):
        small.render(template, long, {})
    assert small.render(template, HELLO, {}) == "hi"
    for _ in range(2):
        with pytest.raises(ChatTemplateError, match="longer than"):
            small.render(template, long, {})
    with pytest.raises(ChatTemplateError, match="several times just now"):
        small.render(template, HELLO, {})
    time.sleep(2.1)
    assert small.render(template, HELLO, {}) == "hi"
    small.close()


def test_few_processes_serve_many_templates(small: TemplateRenderer) -> None:
    for i in (*range(5), 4, 3):
        assert small.render(f"{i}", HELLO, {}) == f"{i}"
        assert len(pids(small)) <= 3
    before = pids(small)
    small.render("4", HELLO, {})
    assert pids(small) == before


def test_no_template_sees_another_ones_process(renderer: TemplateRenderer) -> None:
    renderer.render("{{ messages[0].content }}", HELLO, {})
    one = pids(renderer)
    renderer.render("{{ messages[0].content }}!", HELLO, {})
    assert len(pids(renderer) - one) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_process_has_nothing_of_ours(
    small: TemplateRenderer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LORIKEET_SECRET", "key")
    with open(tmp_path / "open", "w") as file:
        os.set_inheritable(file.fileno(), True)
        small.render("hi", HELLO, {})
        (pid,) = pids(small)
        process = Path(f"/proc/{pid}")
        assert b"key" not in (process / "environ").read_bytes()
        assert sorted(fd.name for fd in (process / "fd").iterdir()) == ["0", "1", "2"]
        assert str((process / "cwd").readlink()) == "/"
    limits = (process / "limits").read_text().splitlines()
    soft = {line[:25].strip(): line[26:].split()[0] for line in limits}
    assert soft["Max file size"] == "0"
    assert soft["Max core file size"] == "0"
    assert soft["Max open files"] == "4"
    assert soft["Max address space"] == str(SMALL.memory)
    assert int(soft["Max cpu time"]) <= 3


def test_a_large_conversation_goes_through(renderer: TemplateRenderer) -> None:
    text = "é" * 1_000_000
    chat = [{"role": "user", "content": text}]
    assert renderer.render("{{ messages[0].content }}", chat, {}) == text


def test_closing_ends_the_processes_and_what_waits() -> None:
    renderer = TemplateRenderer(SMALL)
    renderer.render("hi", HELLO, {})
    (pid,) = pids(renderer)
    renderer.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(ChatTemplateError, match="stopping"):
        renderer.render("hi", HELLO, {})
    renderer.close()


def test_a_forgotten_renderer_leaves_no_process() -> None:
    renderer = TemplateRenderer(SMALL)
    renderer.render("hi", HELLO, {})
    (pid,) = pids(renderer)
    del renderer
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


class TestCheck:
    @pytest.mark.parametrize("template", [CHAT_TEMPLATE, LLAMA, MISTRAL, "{{ bos_token }}"])
    def test_good_templates_pass(self, template: str) -> None:
        check_template(template)

    def test_one_that_wants_a_system_prompt_passes(self) -> None:
        check_template(
            "{% if messages[0].role != 'system' %}{{ raise_exception('no') }}{% endif %}hi"
        )

    @pytest.mark.parametrize(
        ("template", "message"),
        [
            ("{% if %}", "Expected an expression"),
            ("{{ raise_exception('never') }}", "^never$"),
            (HANG, "longer than 0.8 s"),
            ("{{ 'a' * 500000000 }}", "memory"),
            ("  {# nothing #} ", "gives no text"),
        ],
    )
    def test_others_are_refused(self, template: str, message: str) -> None:
        with pytest.raises(ChatTemplateError, match=message):
            check_template(template, limits=SMALL)


def pids(renderer: TemplateRenderer) -> set[int]:
    return {process._process.pid for process in renderer._idle.values()}
