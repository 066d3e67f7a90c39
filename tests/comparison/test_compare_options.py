"""What `qarl compare` refuses before it reads a configuration."""

import pytest

from qarl import cli


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ([], "compare: nothing to compare; give a CONFIG"),
        (["nothing.yaml", "--schemes", "fp8"], "nothing.yaml: no such file or directory"),
        (["c.yaml", "--schemes", "fp8", "--text", "t.txt"], "--text: requires --offline"),
        (["c.yaml", "--schemes", "fp8", "--reuse", "nowhere"], "--reuse: nowhere: no such directory"),
        (["run", "run2", "--seeds", "0,1"], "--seeds: applies to a CONFIG"),
        (["--offline", "model", "c.yaml", "--schemes", "fp8"], "c.yaml: is a file; give a run directory"),
        (["--offline", "model"], "--schemes: needed with --offline"),
    ],
)
def test_a_bad_option_is_one_line_and_nothing_is_written(argv, line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    from comparisons import write_config

    write_config(tmp_path).rename(tmp_path / "c.yaml")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit) as caught:
        cli.main(["compare", *argv])
    error = capsys.readouterr().err
    assert caught.value.code == 2 and error.count("\n") == 1
    assert line in error
    assert sorted(tmp_path.rglob("*")) == before
