"""Draft sources: pure functions that run inside the loop. A new source is one file here."""

from specjax.draft.model import model_drafter
from specjax.draft.ngram import ngram_drafter
from specjax.draft.none import no_drafter

__all__ = ["model_drafter", "ngram_drafter", "no_drafter"]
