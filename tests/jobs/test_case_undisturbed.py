"""Nothing happens to a script under torchrelay: it computes what plain PyTorch computes, to the bit, and to its end.

Each case script in one of its modes, on a stage. What disturbed runs are compared with is plain PyTorch as well.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.running import Fate, Ran, environment, judge, read_lines, run_calm, words_of
from tests.support.stage import Stage

pytestmark = pytest.mark.timeout(180)

CASES = [
    ("bound-anew", "attribute+method+global+variable+entry+row+added+partial+builtin+lambda+hook"),
    ("changed-once", "within"), ("packages", "inside"), ("only-ones", ""), ("raises-on", ""),
    ("averages", "object"), ("collected", "list"), ("control", ""), ("edited", ""), ("exits", "caught"),
    ("evaluates-between", ""),
    ("fake-dimensions", ""),
    ("forgetful-loader", ""),
    ("hard-examples", ""), ("kept-between", "global"), ("kept-copies", "told"), ("kept-inside", "counter"),
    ("kept-elsewhere", "closure"), ("kept-tensors", "hidden"), ("meters", "along"), ("reads-between", "eval"),
    ("outgrows", "counter"), ("recurrent", "module-attributes-large"), ("of-libraries", "graph-step"),
    ("hung", "list-group"), ("on-device", "main"), ("set-elsewhere", "sampler"), ("odd-tensors", "graph"),
    ("before-and-after", "count"),
    ("late-decision", "bare"), ("layers-later", "freeze"), ("outside-decision", "scale"), ("own-attributes", ""),
    ("own-state", "dict"), ("left-behind", "prints"),
    ("own-checkpoint", "plain"), ("own-data", "large"), ("own-objects", "meter"), ("own-places", ""),
    ("own-sampler", "numpy"),
    ("own-stream", "tensor"), ("own-variables", ""), ("own-while-loop", "epochs"), ("returned", "all"),
    ("rebound-buffers", "own"), ("rules", "generator-torch"), ("sparse-gradients", "both"),
    ("saved", "random"),
    ("saves-between", "full"), ("second-loader", "within"), ("stale-gradients", "clip"), ("two-steps", "kept"),
    ("unchanged", ""),
    ("uneven", "counted"), ("written-in-place", "torch"),
]  # fmt: skip


@pytest.mark.parametrize(("script", "mode"), CASES, ids=[script for script, _ in CASES])
def test_a_script_comes_to_the_bits_of_plain_pytorch(tmp_path: Path, script: str, mode: str) -> None:
    plain = run_calm(tmp_path / "plain", script, mode=mode)
    assert plain.code == 0, plain.output
    assert sum(step == "end" for _, step, _ in plain.lines) == 2, "each rank has come to its end"
    out = tmp_path / "out"
    out.mkdir()
    env = environment(out, mode=mode) | {"PAUSE": "0"}
    stage = Stage(tmp_path / "stage", words_of(script), world=2, spares=0, env=env)
    try:
        code = stage.end()
        assert stage.job.accounting.incidents == ()
        ran = Ran(code, stage.all_logs(), read_lines(out), frozenset(), tmp_path)
    finally:
        stage.close()
    verdict = judge(ran, plain)
    assert verdict.fate is Fate.EQUAL, verdict
