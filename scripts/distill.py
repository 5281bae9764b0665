"""Train a draft that fits its target: ``specjax distill`` as a script, to be launched as a job.

python scripts/distill.py --config tiny-draft --data stories.jsonl
"""

from __future__ import annotations

import sys

from specjax.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["distill", *sys.argv[1:]]))
