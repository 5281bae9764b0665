"""``specjax plan``: what a pair needs on each device, and the largest batch that fits."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated

from tyro.conf import arg

from specjax.cli.common import Common, Dtype, note, unset
from specjax.errors import UsageError

if TYPE_CHECKING:
    from specjax.plan import Needs
    from specjax.sharding import MeshShape

GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(Common):
    """Say what a pair needs on each device, from shapes alone: nothing is loaded or compiled.

    One line for each mesh; without --mesh, for every way to split the devices.
    """

    target: Annotated[str, arg(metavar="WHERE|CONFIG")]
    """The target: a config.json, the name of a config that ships (llama-3-70b, llama-3-8b), or a model as elsewhere."""
    draft: Annotated[str | None, unset("WHERE|CONFIG")] = None
    """The draft model, the same way (default: a draft without weights)."""
    devices: Annotated[int, arg(metavar="N")] = 1
    """Devices there are."""
    mesh: Annotated[str | None, unset("data=D,model=M")] = None
    """Only this mesh; ,draft=sharded splits the draft too."""
    hbm_gb: Annotated[float | None, unset("GIB")] = None
    """Memory of each device, in GiB: says what fits, and the largest batch."""
    batch: Annotated[int, arg(metavar="N")] = 8
    """Rows at once, on all devices together."""
    cache_length: Annotated[int | None, unset("N")] = None
    """The most tokens of prompt and output together (default: the target's context)."""
    gamma: Annotated[int, arg(metavar="N")] = 4
    """Tokens drafted per round."""
    dtype: Dtype = "bfloat16"
    """Of the weights."""
    cpu: bool = False
    """The devices are CPUs: caches are float32, and a bfloat16 embedding is widened."""
    logprobs: bool = False
    """Log-probabilities are kept."""
    json: bool = False
    """Print JSON, in bytes."""

    def run(self) -> int:
        """Print the plan; 1 when no mesh fits."""
        from specjax import plan as p
        from specjax.sharding import parse_mesh

        for name, value in (("devices", self.devices), ("batch", self.batch), ("cache_length", self.cache_length)):
            if value is not None and value < 1:
                raise UsageError(f"{name} is {value}; expected at least 1.")
        if self.hbm_gb is not None and not self.hbm_gb > 0:
            raise UsageError(f"hbm_gb is {self.hbm_gb}; expected more than 0.")
        target, draft = p.read_shapes(self.target), None if self.draft is None else p.read_shapes(self.draft)
        meshes = [parse_mesh(self.mesh)] if self.mesh else p.meshes(self.devices)
        if self.mesh and self.devices not in (1, meshes[0].size):
            raise UsageError(f"mesh {self.mesh} has {meshes[0].size} devices, --devices says {self.devices}.")
        length = self.cache_length or target.config.max_positions
        if length > target.config.max_positions:
            raise UsageError(
                f"cache_length is {length}; expected 1..{target.config.max_positions}, the target's context."
            )
        work = p.Work(self.batch, length, self.gamma, self.dtype, "float32" if self.cpu else self.dtype,
                      logprobs=self.logprobs, cpu=self.cpu)  # fmt: skip
        hbm = None if self.hbm_gb is None else int(self.hbm_gb * GIB)
        lines = [
            _Line(mesh, p.needs(target, draft, mesh, work),
                  None if hbm is None else p.largest_batch(target, draft, mesh, work, hbm),
                  p.notes(target, draft, mesh))
            for mesh in meshes
        ]  # fmt: skip
        if self.json:
            print(json.dumps([line.record(hbm) for line in lines], indent=2))
        else:
            _show(lines, hbm, length)
        return 1 if hbm is not None and not any(line.needs.total <= hbm for line in lines) else 0


@dataclasses.dataclass(frozen=True)
class _Line:
    mesh: MeshShape
    needs: Needs
    largest: int | None
    notes: list[str]

    def record(self, hbm: int | None) -> dict:
        """Return the line as JSON has it."""
        fits = None if hbm is None else self.needs.total <= hbm
        return {"mesh": self.mesh.sizes, **dataclasses.asdict(self.needs), "total": self.needs.total, "fits": fits,
                "largest_batch": self.largest, "notes": self.notes}  # fmt: skip


def _show(lines: list[_Line], hbm: int | None, length: int) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"GiB on each device, cache length {length}")
    names = [field.name for field in dataclasses.fields(lines[0].needs)]
    for name in ("data x model", *(name.replace("_", " ") for name in names), "total"):
        table.add_column(name, justify="right")
    if hbm is not None:
        for name in ("fits", "largest batch"):
            table.add_column(name, justify="right")
    for line in lines:
        sizes = [f"{value / GIB:.2f}" for value in (*dataclasses.astuple(line.needs), line.needs.total)]
        fit = [] if hbm is None else ["yes" if line.needs.total <= hbm else "no", str(line.largest)]
        table.add_row(f"{line.mesh.data} x {line.mesh.model}", *sizes, *fit)
    Console(width=140).print(table)
    for line in lines:
        for text in line.notes:
            note(f"{line.mesh.data} x {line.mesh.model}: {text}")
