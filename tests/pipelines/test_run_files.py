"""Files that a run creates."""

from __future__ import annotations

from pathlib import Path

from pipelines.experiment.files import create


def test_a_file_that_a_killed_process_left_is_replaced_and_no_link_is_followed(
    tmp_path: Path,
) -> None:
    elsewhere, path = tmp_path / "elsewhere", tmp_path / "checkpoint.tmp"
    elsewhere.write_text("mine")
    path.symlink_to(elsewhere)
    for text in (b"long before", b"now"):
        with create(path) as file:
            file.write(text)
    assert path.read_bytes() == b"now"
    assert not path.is_symlink()
    assert elsewhere.read_text() == "mine"
