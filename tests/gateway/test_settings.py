"""Settings of the gateway and what its program says about bad ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gateway.__main__ import main
from gateway.settings import GatewaySettings
from outrider.service.settings import BadSettingsError

ROOT = Path(__file__).resolve().parents[2]


def load(*arguments: str) -> GatewaySettings:
    return GatewaySettings.load(arguments, program="gateway")


def test_flags_environment_and_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_GATEWAY_DRAFTERS", "d:1")
    settings = load("--verifiers", "a:1,b:2", "--max-concurrent-sequences", "7")
    assert settings.verifiers == ("a:1", "b:2")
    assert settings.drafters == ("d:1",)
    assert settings.max_concurrent_sequences == 7
    assert settings.listen == "127.0.0.1:50051"
    assert settings.tokenizer is None


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ((), "verifiers"),
        (("--verifiers", ""), "verifiers"),
        (("--verifiers", "localhost"), "verifiers"),
        (("--verifiers", "a:0"), "verifiers"),
        (("--verifiers", "a:1,a:1"), "verifiers"),
        (("--verifiers", "a:1", "--drafters", "nowhere"), "drafters"),
        (("--verifiers", "dns:///a"), "verifiers"),
        (("--verifiers", "dns://server/a:1"), "verifiers"),
        (("--verifiers", "dns:a:1"), "verifiers"),
        (("--verifiers", "a:1", "--dns-refresh-seconds", "0"), "--dns-refresh-seconds"),
        (("--verifiers", "a:1", "--max-concurrent-sequences", "0"), "--max-concurrent-sequences"),
        (("--verifiers", "a:1", "--max-queued-requests", "-1"), "--max-queued-requests"),
        (("--verifiers", "a:1", "--max-queue-seconds", "0"), "--max-queue-seconds"),
    ],
)
def test_bad_value_names_the_key(arguments: tuple[str, ...], key: str) -> None:
    with pytest.raises(BadSettingsError, match=key):
        load(*arguments)


def test_program_ends_with_2_for_bad_settings(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--verifiers", "nowhere"]) == 2
    assert "verifiers" in capsys.readouterr().err
    assert main(["--verifiers", "a:1", "--tokenizer", str(tmp_path)]) == 2
    assert "tokenizer.json" in capsys.readouterr().err
    (tmp_path / "tokenizer.json").write_text("{}")
    assert main(["--verifiers", "a:1", "--tokenizer", str(tmp_path)]) == 2
    assert "is no tokenizer" in capsys.readouterr().err


def test_gateway_leaves_torch_and_transformers_out() -> None:
    code = "import sys, gateway.__main__; sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
