"""``specjax convert``: a checkpoint in another form."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from specjax.cli.common import Common, prepare_jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Convert(Common):
    """Write a model as a folder in Hugging Face layout or as an Orbax folder; print its folder.

    With --dtype keep, every tensor's bytes and the config come through unchanged; what GGUF quantised becomes float32.
    """

    source: Annotated[str, arg(metavar="SOURCE"), Positional]
    """The model: a folder in Hugging Face layout, an Orbax folder, a .gguf file, a known name, or a hub id."""
    dest: Annotated[str, arg(metavar="DEST"), Positional]
    """The folder to write; it must not exist, and is complete or absent whatever happens."""
    to: Literal["hf", "orbax"] = "hf"
    """Its form."""
    dtype: Literal["keep", "float32", "bfloat16"] = "keep"
    """Of every tensor of floats."""

    def run(self) -> int:
        """Convert, and print the folder."""
        prepare_jax()
        from specjax.checkpoint import convert

        print(convert(self.source, self.dest, to=self.to, dtype=self.dtype, progress=True))
        return 0
