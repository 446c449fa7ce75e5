"""The picture that a finished run offers to draw."""

from __future__ import annotations

import json

import pytest

from tinker_cookbook.exceptions import ConfigurationError, DataError
from tinker_cookbook.plot import PlotConfig, main, short_labels


@pytest.mark.parametrize("key", ["train_mean_nll", "reward/total"])
def test_without_settings_it_draws_what_the_run_has(tmp_path, key):
    rows = [{"step": i, key: 1.0 / (i + 1)} for i in range(3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    main(PlotConfig(log_path=str(tmp_path)))
    assert (tmp_path / "curves.png").stat().st_size > 5000


def test_several_runs_and_folders_that_are_none(tmp_path):
    runs = [tmp_path / name / "run" for name in ("a", "b,c")]
    for folder in runs:
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text('{"step": 1, "test/nll": 2.0}\n')
    assert short_labels(runs) == ["a/run", "b,c/run"]
    main(PlotConfig(log_path=str(runs[1])))  # one folder, with a comma
    main(
        PlotConfig(log_path=f"{runs[0]}, {tmp_path / 'a' / 'run'}", output=str(tmp_path / "x.png"))
    )
    assert (tmp_path / "x.png").stat().st_size > 5000
    for log_path in ("NOPE", f"{runs[0]},NOPE"):
        with pytest.raises(ConfigurationError, match="NOPE: there is no such folder"):
            main(PlotConfig(log_path=log_path))
    with pytest.raises(DataError, match=r"has no metrics\.jsonl with rows"):
        main(PlotConfig(log_path=str(tmp_path)))
