"""Training drafts that fit their target: data, losses, the step, and the run around them.

config      the recipe, a TOML file          rows, examples    files to prompts and completions
packing     texts side by side in rows       shards, pipeline  on disk, and from there to batches
responses   what our own engine writes       losses, step      the mathematics
student     what is trained                  train             the loop
validate    the real decoder                 checkpoints, folder, card, figures
"""

from __future__ import annotations

from specjax.distill.config import Recipe, read_recipe
from specjax.distill.losses import LOSSES, loss_for
from specjax.distill.train import distill

__all__ = ["LOSSES", "Recipe", "distill", "loss_for", "read_recipe"]
