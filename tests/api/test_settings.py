from __future__ import annotations

from pathlib import Path

import pytest

from api.settings import ENV_PREFIX, Settings, SettingsError, parse_size, unknown_variables


def test_flags_win_over_environment_which_wins_over_defaults() -> None:
    environ = {"LORIKEET_PORT": "1234", "LORIKEET_HOST": "0.0.0.0", "OTHER_PORT": "1"}
    settings = Settings.from_args(["--port", "4321"], environ)
    assert (settings.port, settings.host) == (4321, "0.0.0.0")
    assert settings.max_running == Settings().max_running


def test_every_field_has_a_flag_with_help_and_a_variable(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        Settings.from_args(["--help"], {})
    assert exit_info.value.code == 0
    shown = capsys.readouterr().out
    for name in Settings.__dataclass_fields__:
        assert "--" + name.replace("_", "-") in shown
        assert Settings.__dataclass_fields__[name].metadata["help"]


@pytest.mark.parametrize(
    ("variable", "value", "field", "expected"),
    [
        ("KV_MEMORY", "2GiB", "kv_memory", 2 << 30),
        ("PREFIX_CACHE", "off", "prefix_cache", False),
        ("PREFIX_CACHE", "1", "prefix_cache", True),
        ("DATA", "/srv/x", "data", Path("/srv/x")),
        ("MAX_RANK", "8", "max_rank", 8),
        ("REDIS", "redis://db:6379/1", "redis", "redis://db:6379/1"),
        ("REDIS", "", "redis", None),
    ],
)
def test_environment_variables_are_typed(
    variable: str, value: str, field: str, expected: object
) -> None:
    settings = Settings.from_args([], {ENV_PREFIX + variable: value})
    assert getattr(settings, field) == expected


def test_a_flag_turns_a_boolean_off() -> None:
    assert Settings.from_args(["--no-prefix-cache"], {}).prefix_cache is False


@pytest.mark.parametrize(
    ("text", "size"),
    [("512MiB", 512 << 20), ("1.5kib", 1536), ("2 GB", 2 * 10**9), ("7", 7), ("7B", 7)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "-1MiB", "1e9", "12 parsecs", "1" * 40, "nan"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("arguments", "environ", "message"),
    [
        (["--port", "70000"], {}, "--port: 70000 is above the largest, 65535"),
        (["--max-running", "0"], {}, "--max-running: 0 is below the least, 1"),
        (["--dtype", "int4"], {}, "--dtype: 'int4' is not one of float32, bfloat16, float16"),
        (["--device", "tpu"], {}, "--device: 'tpu'"),
        (["--redis", "localhost"], {}, "must start with redis://"),
        (["--kv-memory", "lots"], {}, "--kv-memory: 'lots' is not a size"),
        (["--por", "1"], {}, "unrecognized arguments: --por"),
        ([], {"LORIKEET_PORT": "tcp://10.0.0.1:80"}, "LORIKEET_PORT: 'tcp://10.0.0.1:80'"),
        ([], {"LORIKEET_PREFIX_CACHE": "maybe"}, "LORIKEET_PREFIX_CACHE: 'maybe'"),
    ],
)
def test_bad_values_end_the_program_with_a_message(
    arguments: list[str],
    environ: dict[str, str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        Settings.from_args(arguments, environ)
    assert exit_info.value.code == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1 and shown.endswith("(see serve --help)\n")


def test_a_misspelt_variable_is_named_with_the_nearest() -> None:
    environ = {"LORIKEET_KV_MEMROY": "1GiB", "LORIKEET_PORT": "1", "OTHER": ""}
    (text,) = unknown_variables(environ)
    assert text == "LORIKEET_KV_MEMROY is no setting; did you mean LORIKEET_KV_MEMORY?"


def test_settings_check_themselves_without_a_command_line() -> None:
    with pytest.raises(SettingsError, match="--step-tokens: 0 is below the least, 1"):
        Settings(step_tokens=0)


def test_the_base_is_called_by_its_id_or_its_folder(tmp_path: Path) -> None:
    (tmp_path / "my-model").mkdir()
    assert Settings(model="org/name").public_name == "org/name"
    assert Settings(model=str(tmp_path / "my-model")).public_name == "my-model"
    assert Settings(model="org/name", model_name="short").public_name == "short"


def test_the_engine_gets_its_part() -> None:
    config = Settings(max_running=3, prefix_cache=False).engine_config()
    assert (config.max_running, config.prefix_cache) == (3, False)
