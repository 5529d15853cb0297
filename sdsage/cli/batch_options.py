"""Options that `sdsage batch` alone takes; a part of the table in options.py."""

from .option import BATCH, Kind, Option, Panel

_VERBS = frozenset({BATCH})
BATCH_OPTIONS = (
    Option("--folder", "Folder of the batch, where its journal, results.jsonl and contact-sheet.html are",
           Panel.OUTPUT, Kind.FOLDER, default_text="the folder that all outputs are in", verbs=_VERBS, record=False),
    Option("--storage", "Storage that the outputs go to in place of the folder: an address of fsspec such as "
           "s3://bucket/folder; the journal stays in the folder and is copied there", Panel.OUTPUT, unit="address",
           default_text="the folder itself", verbs=_VERBS, record=False),
    Option("--gpus", "GPUs to run on, one worker process for each", Panel.RUN, Kind.INTS, unit="numbers", low=0,
           default=(), default_text="all of them, else the CPU", verbs=_VERBS, record=False),
    Option("--cpu-workers", "Run on the CPU, in this many worker processes, which share its cores", Panel.RUN, Kind.INT,
           unit="processes", low=1, high=64, default_text="1 where there is no GPU", verbs=_VERBS, record=False,
           beaten_by=("--gpus",)),
    Option("--ray", "Run on a Ray cluster: auto for the one that this machine is a node of, or HOST:PORT; "
           "--cpu-workers then counts for each node", Panel.RUN, unit="address", default_text="this machine alone",
           verbs=_VERBS, record=False),
    Option("--only", "Run only these jobs: numbers such as 3,7-9, or a pattern of output names such as 'out/cat*'",
           Panel.RUN, unit="numbers or pattern", default_text="all jobs", verbs=_VERBS, record=False),
    Option("--limit", "Run at most this many jobs now", Panel.RUN, Kind.INT, unit="jobs", low=1,
           default_text="all jobs", verbs=_VERBS, record=False),
    Option("--max-failures", "Stop when this many jobs have failed", Panel.RUN, Kind.INT, unit="jobs", low=1,
           default_text="go on with the next one", verbs=_VERBS, record=False),
    Option("--retry-failed", "Run jobs again that have failed or were set aside", Panel.RUN, Kind.SWITCH, verbs=_VERBS,
           record=False),
    Option("--dry-run", "Print the plan and stop: jobs, their order, model loads, time and memory so far as they are "
           "known, outputs that exist", Panel.RUN, Kind.SWITCH, verbs=_VERBS, record=False),
)  # fmt: skip
