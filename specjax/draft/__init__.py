"""Draft sources: pure functions that run inside the loop. A new source is one file here."""

from specjax.draft.early_exit import early_exit_drafter
from specjax.draft.head import head_drafter
from specjax.draft.mixed import mixed_drafter
from specjax.draft.model import model_drafter
from specjax.draft.ngram import ngram_drafter
from specjax.draft.none import no_drafter
from specjax.draft.trimmed import TrimmedFn

__all__ = [
    "TrimmedFn",
    "early_exit_drafter",
    "head_drafter",
    "mixed_drafter",
    "model_drafter",
    "ngram_drafter",
    "no_drafter",
]
