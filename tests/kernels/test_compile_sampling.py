"""The sampling kernels compile for a real GPU; the interpreter also runs what does not."""

from __future__ import annotations

from pathlib import Path

from tests.compiling import report_of


def test_kernels_compile_for_hopper(tmp_path: Path) -> None:
    result = report_of("tests.kernels.compile_sampling", cache=tmp_path)
    assert set(result["kernels"]) == {
        "_block_statistics_kernel",
        "_blocks_kernel",
        "_draft_sample_kernel",
        "_emit_kernel",
        "_group_keys_kernel",
        "_last_draw_kernel",
        "_penalties_kernel",
        "_penalty_tables_kernel",
        "_random_words_kernel",
        "_thresholds_kernel",
    }
    assert result["shared_bytes"] <= 227 * 1024
    assert result["local"] == []
    assert result["early"] == {}
    assert max(result["stack_bytes"].values()) <= 64
