"""stub"""
import dataclasses
from specjax.cli.common import PairOptions
@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench(PairOptions):
    """Bench."""
    def run(self) -> int:
        return 0
