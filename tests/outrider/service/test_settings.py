"""Settings: flag before environment before file before default, and nothing unknown in any of them."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
from pydantic import Field, ValidationError
from pydantic_settings import SettingsConfigDict

from outrider.service.settings import AddressList, BadSettingsError, ModelSettings, ServiceSettings


class Settings(ServiceSettings):
    """A service for this test."""

    model_config = SettingsConfigDict(env_prefix="OUTRIDER_VERIFIER_")

    max_things: int = Field(default=4, ge=1, description="most things")
    is_eager: bool = Field(default=False, description="whether to be eager")
    peers: AddressList = Field(default=(), description="addresses")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTRIDER_TEST_DEVICE", raising=False)


def load(*arguments: str) -> Settings:
    return Settings.load(arguments, program="test")


def test_flag_before_environment_before_file_before_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "settings.toml"
    path.write_text('max_things = 7\nlisten = "127.0.0.1:7"\npeers = ["a:1", "b:2"]')
    assert load().max_things == 4
    assert load("--config", str(path)).max_things == 7
    monkeypatch.setenv("OUTRIDER_VERIFIER_MAX_THINGS", "8")
    assert load(f"--config={path}").max_things == 8
    assert load("--config", str(path), "--max-things", "9").max_things == 9
    monkeypatch.setenv("OUTRIDER_VERIFIER_CONFIG", str(path))
    found = load()
    assert (found.max_things, found.listen, found.peers) == (8, "127.0.0.1:7", ("a:1", "b:2"))
    assert Settings().max_things == 8, "the file belongs to one call of load, not to the class"


def test_lists_and_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load("--peers", "a:1, b:2,").peers == ("a:1", "b:2")
    monkeypatch.setenv("OUTRIDER_VERIFIER_PEERS", "c:3")
    assert load().peers == ("c:3",)
    assert load("--is-eager").is_eager
    assert not load("--no-is-eager").is_eager


def test_they_are_frozen() -> None:
    with pytest.raises(ValidationError):
        load().max_things = 5


@pytest.mark.parametrize("flag", ["--max_things", "--maxthings", "--max-thing", "--nothing"])
def test_unknown_flags(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a flag that is taken for another one, or for nothing at all."""
    with pytest.raises(SystemExit) as caught:
        load(flag, "3")
    assert caught.value.code == 2
    assert flag in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["OUTRIDER_VERIFIER_MAX_THINGZ", "OUTRIDER_MAX_THINGS", "OUTRIDER_VERIFIERS", "OUTRIDER_VERIFIER_"]
)
def test_unknown_variables(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "3")
    with pytest.raises(BadSettingsError, match=f"^{name}: unknown"):
        load()


def test_variables_of_the_other_services_are_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_DRAFTER_ANYTHING", "3")
    monkeypatch.setenv("OUTRIDER_GATEWAY_MAX_THINGS", "3")
    assert load().max_things == 4


def test_unknown_keys_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text("max_thingz = 3")
    with pytest.raises(BadSettingsError, match="max_thingz"):
        load("--config", str(path))


def test_a_file_that_is_not_there_or_no_toml(tmp_path: Path) -> None:
    with pytest.raises(BadSettingsError, match="no file at"):
        load("--config", str(tmp_path / "none.toml"))
    path = tmp_path / "settings.toml"
    path.write_text("max_things: 3")
    with pytest.raises(BadSettingsError):
        load("--config", str(path))


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (("--max-things", "0"), "--max-things"),
        (("--max-things=many",), "--max-things"),
        (("--drain-seconds", "-1"), "--drain-seconds"),
        (("--log-level", "LOUD"), "--log-level"),
        (("--max-message-bytes", "7"), "--max-message-bytes"),
        (("--listen", "localhost"), "--listen"),
        (("--listen", "localhost:99999"), "--listen"),
        (("--listen", ":1"), "--listen"),
        (("--listen", "::1"), "--listen"),
        (("--health-listen", "127.0.0.1:http"), "--health-listen"),
    ],
)
def test_bad_values_name_their_flag(arguments: tuple[str, ...], key: str) -> None:
    with pytest.raises(BadSettingsError, match=f"^{key}: ") as caught:
        load(*arguments)
    # Nothing of the library that checks: not its words, nor a pattern that only a programmer reads.
    for word in ("Value error", "Input should", "String should", "pattern", "unable to parse"):
        assert word not in str(caught.value)


def test_bad_values_name_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an operator who set a variable, or a key in a file, and looks in vain for a flag of that name."""
    path = tmp_path / "settings.toml"
    path.write_text("max_things = 0\ntls_key = 'key.pem'")
    with pytest.raises(BadSettingsError, match=f"^max_things in {path}: must be greater than or equal to 1, is 0$"):
        load("--config", str(path))
    monkeypatch.setenv("OUTRIDER_VERIFIER_MAX_THINGS", "none")
    with pytest.raises(BadSettingsError, match=r"^OUTRIDER_VERIFIER_MAX_THINGS: must be a valid integer, is 'none'$"):
        load("--config", str(path))
    monkeypatch.setenv("OUTRIDER_VERIFIER_MAX_THINGS", "1")
    with pytest.raises(BadSettingsError, match=f"^tls_key in {path} needs --tls-certificate$"):
        load("--config", str(path))
    with pytest.raises(BadSettingsError, match=r"^--max-things: "):
        load("--max-things", "0")


def test_what_is_required() -> None:
    class Needy(Settings):
        model: Path

    with pytest.raises(BadSettingsError, match=r"^--model is required; OUTRIDER_VERIFIER_MODEL sets it too$"):
        Needy.load([], program="test")


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"block_size": 24}, "block_size"),
        ({"block_size": 8}, "block_size"),
        ({"num_blocks": 0}, "num_blocks"),
        ({"max_num_batched_tokens": 63}, "max_num_batched_tokens"),
        ({"device": "tpu"}, "device"),
        ({"dtype": "int8"}, "dtype"),
        ({"memory_fraction": 0.0}, "memory_fraction"),
    ],
)
def test_a_models_settings(fields: dict[str, object], key: str) -> None:
    ModelSettings(block_size=32, num_blocks=1, device="cuda:3", dtype="bfloat16", memory_fraction=1)
    with pytest.raises(ValidationError, match=key):
        ModelSettings(**fields)  # type: ignore[arg-type]


def test_a_list_may_be_written_in_parts() -> None:
    assert load("--peers", "a:1", "--peers=b:2,c:3").peers == ("a:1", "b:2", "c:3")


@pytest.mark.parametrize("program", ["gateway", "verifier_service", "drafter_service"])
def test_help_is_for_people(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches names of Python's types, and a wall of flags without order."""
    module = importlib.import_module(f"{program}.settings")
    name = {"gateway": "GatewaySettings", "verifier_service": "VerifierSettings", "drafter_service": "DrafterSettings"}
    cls: type[ServiceSettings] = getattr(module, name[program])
    with pytest.raises(SystemExit):
        cls.load(["--help"], program=f"python -m {program}")
    text = capsys.readouterr().out
    assert not re.search(r"--[a-z-]+ \{?(str|int|float|bool|Path|tuple|None)\b|None|SUPPRESS", text)
    assert "who may call, and over what:" in text
    assert "HOST:PORT" in text
    for field in cls.model_fields:
        assert f"--{field.replace('_', '-')} " in text or f"--{field.replace('_', '-')}," in text


def test_help_tells_of_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load("--help")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for name, field in Settings.model_fields.items():
        assert f"--{name.replace('_', '-')}" in text
        assert field.description, f"{name} has no description"
