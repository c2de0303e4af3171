"""compare.py runs each side's own code in turns, and makes ratios of nothing but what both sides measured."""

from __future__ import annotations

import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest

from benchmarks import compare
from benchmarks.checkouts import ROOT, Checkout, CheckoutError, describe, ensure_stubs, export
from benchmarks.records import of_kind, read_records

# A benchmark that takes no time: what it reports stands in files beside it, one line a run, and the last line stays.
_BENCHMARK = """
    import json, pathlib, sys
    here = pathlib.Path(__file__).parent
    with (here.parents[1] / "order.txt").open("a") as order:
        order.write(here.parent.name + " " + " ".join(sys.argv[3:]) + "\\n")
    plan = here / "plan.txt"
    first, *rest = plan.read_text().splitlines()
    if rest:
        plan.write_text("\\n".join(rest))
    speed, void, status = first.split()
    with open(sys.argv[2], "w") as out:
        for batch_size in (1, 8):
            is_void = void == "void" and batch_size == 8
            record = {"kind": "serve", "batch_size": batch_size, "tokens_per_second": float(speed) * batch_size}
            print(json.dumps({**record, "void": "planted" if is_void else None}), file=out)
        if status == "refused":
            print(json.dumps({"kind": "refused", "reason": "planted"}), file=out)
    sys.exit(3 if status == "refused" else int(status))
"""


def _checkout(path: Path, *plan: str) -> Path:
    for package in ("benchmarks", "outrider", "outrider/v1"):
        (path / package).mkdir(parents=True)
        (path / package / "__init__.py").touch()
    (path / "outrider/v1/common_pb2.py").touch()
    (path / "benchmarks/fake.py").write_text(textwrap.dedent(_BENCHMARK))
    (path / "benchmarks/plan.txt").write_text("\n".join(plan))
    return path


def _run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    base: tuple[str, ...],
    head: tuple[str, ...],
    *flags: str,
    rounds: int = 2,
) -> int:
    monkeypatch.setattr(compare, "ROOT", _checkout(tmp_path / "the-head", *head))
    arguments = ["--base-dir", str(_checkout(tmp_path / "the-base", *base)), "--rounds", str(rounds)]
    return compare.main(
        [*arguments, *flags, "--module", "fake", "--out", str(tmp_path / "out"), "--", "--option", "value"]
    )


def test_both_sides_run_their_own_code_in_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status = _run(tmp_path, monkeypatch, ("100 - 0",), ("150 - 0", "110 - 0", "120 - 0"), rounds=3)
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert (tmp_path / "order.txt").read_text().splitlines() == [
        "the-base --option value",
        "the-head --option value",
    ] * 3
    records = read_records(tmp_path / "out" / "compare.jsonl")
    pairs = compare.ratios_of(tmp_path / "out", records)
    assert pairs["serve: batch_size 8", "tokens_per_second"] == [(800, 1200), (800, 880), (800, 960)]
    lines = [line.split() for line in printed.splitlines() if line.startswith("serve: ")]
    assert [line[2] for line in lines] == ["1", "8"]
    assert all(line[-7:] == ["1.200", "1.100", "to", "1.500", "3", "of", "3"] for line in lines)
    for side, name in zip(of_kind(records, "side"), ("the-base", "the-head"), strict=True):
        assert side["modules"]["outrider"] == str(tmp_path / name / "outrider" / "__init__.py")


@pytest.mark.parametrize(("status", "reason"), [("1", "exit status 1"), ("refused", "refused: planted")])
def test_a_round_that_failed_gives_no_ratio(
    status: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(tmp_path, monkeypatch, ("100 - 0", f"100 - {status}"), ("150 - 0",)) == 1
    printed = capsys.readouterr().out
    assert f"FAILED: round 2, base: {reason}: no ratio of this round" in printed
    pairs = compare.ratios_of(tmp_path / "out", read_records(tmp_path / "out" / "compare.jsonl"))
    assert [len(values) for values in pairs.values()] == [1, 1]
    assert "1 of 2" in printed


def test_a_void_measurement_gives_no_ratio_and_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 4 is how a benchmark ends that had void runs.
    assert _run(tmp_path, monkeypatch, ("100 - 0",), ("150 void 4",), rounds=1) == 0
    pairs = compare.ratios_of(tmp_path / "out", read_records(tmp_path / "out" / "compare.jsonl"))
    assert list(pairs) == [("serve: batch_size 1", "tokens_per_second")]


def test_nothing_in_common_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(tmp_path, monkeypatch, ("100 - 7",), ("150 - 0",), rounds=1) == 1
    assert "no ratio" in capsys.readouterr().out


def test_rounds_that_do_not_fit_into_the_time_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(tmp_path, monkeypatch, ("100 - 0",), ("150 - 0",), "--budget-seconds", "0", rounds=1) == 1
    assert "left out, the time is up: round 1" in capsys.readouterr().out
    assert not (tmp_path / "order.txt").exists()


def test_heads_benchmarks_can_measure_the_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _run(tmp_path, monkeypatch, ("1 - 9",), ("150 - 0",), "--head-benchmarks", rounds=1) == 0
    base, _ = of_kind(read_records(tmp_path / "out" / "compare.jsonl"), "side")
    assert base["modules"]["outrider"].startswith(str(tmp_path / "the-base"))
    assert not base["modules"]["benchmarks"].startswith(str(tmp_path / "the-base"))


def test_a_side_that_would_run_foreign_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    side = Checkout("base", _checkout(tmp_path / "one", "1 - 0"))
    assert side.modules()["outrider"] == str(tmp_path / "one" / "outrider" / "__init__.py")
    other = Checkout("other", _checkout(tmp_path / "two", "1 - 0"))
    monkeypatch.setattr(Checkout, "environment", lambda _: {"PYTHONPATH": str(other.path)})
    with pytest.raises(CheckoutError, match=r"comes from .*two"):
        side.modules()


def _git(directory: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=Nobody", "-c", "user.email=nobody@example.com"]
    subprocess.run(["git", "-C", str(directory), *identity, *arguments], check=True, capture_output=True)


def test_a_revision_comes_from_git_as_it_was_committed(tmp_path: Path) -> None:
    repository, directory = tmp_path / "repository", tmp_path / "base"
    repository.mkdir()
    directory.mkdir()
    assert describe(repository) is None
    _git(repository, "init", "--quiet")
    (repository / "file.txt").write_text("committed")
    _git(repository, "add", "file.txt")
    _git(repository, "commit", "--quiet", "-m", "one")
    revision = describe(repository)
    (repository / "file.txt").write_text("changed")
    assert describe(repository) == f"{revision}-dirty"
    name = export("HEAD", directory, repository=repository)
    assert name.startswith(str(revision))
    assert [path.name for path in directory.iterdir()] == ["file.txt"]
    assert (directory / "file.txt").read_text() == "committed"
    with pytest.raises(CheckoutError, match="--base-dir"):
        export("no-such-revision", directory, repository=repository)


def test_stubs_are_copied_only_where_the_protos_are_the_same(tmp_path: Path) -> None:
    same, other = tmp_path / "same", tmp_path / "other"
    for checkout in (same, other):
        shutil.copytree(ROOT / "protos", checkout / "protos")
        (checkout / "outrider").mkdir()
    proto = other / "protos/outrider/v1/common.proto"
    proto.write_text(proto.read_text() + "\nmessage AddedByTheTest {}\n")
    assert ensure_stubs(same) == "copied"
    assert ensure_stubs(same) == "there already"
    assert ensure_stubs(other) == "compiled"
    assert "AddedByTheTest" in (other / "outrider/v1/common_pb2.pyi").read_text()
    assert {path.name for path in (same / "outrider/v1").glob("*_pb2*.py")} == {
        path.name for path in (other / "outrider/v1").glob("*_pb2*.py")
    }
    proto.write_text("no proto")
    shutil.rmtree(other / "outrider/v1")
    with pytest.raises(CheckoutError, match="whose protos are others"):
        ensure_stubs(other)
