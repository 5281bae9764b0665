"""``specjax score``: exact log-probabilities of given tokens."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from tyro.conf import arg

from specjax.cli.common import Common, Dtype, note, prepare_jax, progress_bar


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score(Common):
    """Write the log-probability of every token of given rows under a model."""

    target: Annotated[str, arg(metavar="WHERE")]
    """The model: a folder in Hugging Face layout, a .gguf file, a name that 'specjax fetch' knows, or a hub id."""
    input: Annotated[str, arg(metavar="FILE|-")]
    """Rows {"id", "ids"} as JSON Lines; - is standard input."""
    output: Annotated[str, arg(metavar="FILE|-")]
    """Where rows {"id", "logprobs"} go, null for the first token; - is standard output."""
    dtype: Dtype = "bfloat16"
    """Of the weights; sums are float32 in both."""
    overwrite: bool = False
    """Replace an output that exists."""

    def run(self) -> int:
        """Score every row; 1 when some cannot be scored."""
        from specjax.outputs import RowWriter
        from specjax.rows import read_score_rows

        rows = read_score_rows(self.input)
        with RowWriter(self.output, overwrite=self.overwrite, report=note) as writer:
            prepare_jax()
            from specjax.pair import load_model
            from specjax.score import score

            model = load_model(self.target, dtype=self.dtype, progress=True)
            failed = 0
            with progress_bar(len(rows), "rows") as update:

                def on_output(result: dict) -> None:
                    nonlocal failed
                    failed += "error" in result
                    writer.write(result)
                    update(1, "")

                score(model, rows, on_output=on_output)
        if failed:
            note(f"{failed} of {len(rows)} rows failed; their records say why.")
        return 1 if failed else 0
