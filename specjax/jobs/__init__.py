"""Jobs: rows in, parts and a manifest out; what stops goes on where it stopped."""

from specjax.jobs.place import Place
from specjax.jobs.run import JobResult, run_job

__all__ = ["JobResult", "Place", "run_job"]
