"""`sdsage batch JOBS`: a list of jobs; `sdsage batch status FOLDER`: how far one is."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdsage.errors import BadRequest, SdsageError

from .console import begin, console
from .eta import duration
from .option import BATCH
from .settings import Settings, merge

if TYPE_CHECKING:
    from sdsage.batch import Batch, Done
    from sdsage.batch.state import State


class JobsFailed(SdsageError):
    """Some jobs of a batch did not work; the message says how many."""


def run(raw: Mapping[str, Any]) -> None:
    words = list(raw.get("files") or ())
    settings = merge(BATCH, raw)
    settings.problems.stop_if_any()
    if words[:1] == ["status"] and len(words) == 2:
        show_status(Path(words[1]), settings)
        return
    if len(words) != 1:
        raise BadRequest("name one job file, as in 'sdsage batch jobs.yaml', or 'sdsage batch status FOLDER'")
    begin(settings)
    settings.problems.stop_if_any()
    from sdsage.batch import Batch

    batch = Batch(
        words[0],
        folder=settings["folder"],
        storage=settings["storage"],
        on_note=lambda text: console().message("note", text),
    )
    for sentence in batch.plan.warnings:
        console().message("warning", sentence)
    if settings["dry_run"]:
        show_plan(batch, batch.look(overwrite=settings["overwrite"]), settings)
        return
    done = _run(batch, settings)
    show(done)


def _run(batch: "Batch", settings: Settings) -> "Done":
    from .watch import Watcher

    with Watcher(settings) as watcher:
        return batch.run(
            on_event=watcher.hear,
            watch=watcher.watch,
            gpus=settings["gpus"],
            cpu_workers=settings["cpu_workers"],
            ray=settings["ray"],
            **{key: settings[key] for key in ("only", "limit", "max_failures", "retry_failed", "overwrite")},
        )


def show(done: "Done") -> None:
    """The end of a run. Raises JobsFailed unless all that was to be done is done."""
    p = done.progress
    counts = {"total": p.total, "done": p.done, "failed": p.failed, "left": p.left, "loads": p.loads}
    files = {"folder": str(done.folder), "results": str(done.folder / "results.jsonl"), "sheet": str(done.sheet)}
    console().line(f"{p.done} of {p.total} jobs are done, {p.failed} failed, {p.left} left", kind="summary")
    console().result({"verb": BATCH, **counts, **files}, exit_code=1 if p.failed else 0)
    if p.failed:
        raise JobsFailed(
            f"{p.failed} of {p.total} jobs failed: results.jsonl and contact-sheet.html in {done.folder} say why; "
            "--retry-failed runs them again"
        )
    if not console().json:
        print(done.sheet)


def show_plan(batch: "Batch", state: "State", settings: Settings) -> None:
    """--dry-run: jobs in their order, with what is known of them."""
    from sdsage._supervisor import Worker
    from sdsage.batch.journal import DONE
    from sdsage.batch.plan import peak_memory

    todo = state.todo(settings["only"], settings["limit"], settings["retry_failed"])
    times: dict[str, list[float]] = {}
    for row in state.rows.values():
        if row.state == DONE and row.seconds:
            times.setdefault(row.kind, []).append(row.seconds)
    memory: dict[str, float | None] = {}
    with Worker() as worker:
        for job in todo:
            if job.kind not in memory:
                memory[job.kind] = peak_memory(batch.plan, job, worker)
    jobs: list[dict[str, Any]] = []
    group, loads = "", 0
    for job in todo:
        load, group = job.group != group, job.group
        loads += load
        known = times.get(job.kind)
        row = state.row(job)
        entry = {"job": job.number, "output": job.output, "mode": job.wanted.verb, "model": job.model, "load": load}
        entry |= {"state": row.state, "exists": any(path.exists() for path in job.paths)}
        entry |= {"seconds": sum(known) / len(known) if known else None, "memory_gib": memory[job.kind]}
        jobs.append(entry)
    done = state.count(DONE)
    there = [j.output for j in batch.plan.jobs if state.row(j).state == DONE]
    seconds = sum(j["seconds"] or 0.0 for j in jobs)
    unknown = sum(j["seconds"] is None for j in jobs)
    totals = {"total": len(state.rows), "done": done, "loads": loads, "seconds": seconds, "seconds_unknown": unknown}
    console().result({"verb": BATCH, **totals, "folder": str(batch.folder), "jobs": jobs, "exist": there})
    if not console().json:
        for entry in jobs:
            print(_plan_line(entry))
        time = duration(seconds) if not unknown else f"not known yet for {unknown} of them"
        print(f"{len(jobs)} jobs to run, {done} of {len(state.rows)} done already; {loads} model loads; time: {time}")


def _plan_line(entry: Mapping[str, Any]) -> str:
    facts = [entry["mode"], f"model {entry['model']}" + (" (load)" if entry["load"] else "")]
    facts += [f"about {duration(entry['seconds'])}"] if entry["seconds"] is not None else []
    facts += [f"about {entry['memory_gib']:.1f} GiB"] if entry["memory_gib"] is not None else []
    facts += ["was begun"] if entry["state"] == "running" else []
    facts += ["output exists"] if entry["exists"] else []
    return f"{entry['job']:>5}  {entry['output']}  ({', '.join(facts)})"


def show_status(folder: Path, settings: Settings) -> None:
    """Reads the journal and what the running batch says, and disturbs nothing."""
    from sdsage.batch import described, status
    from sdsage.batch.journal import ASIDE, DONE, FAILED, outputs_of
    from sdsage.batch.lock import live

    rows, running = status(folder), live(folder)
    states = [row.state for row in rows]
    failed = states.count(FAILED) + states.count(ASIDE)
    counts = {"total": len(rows), "done": states.count(DONE), "failed": failed}
    counts["left"] = counts["total"] - counts["done"] - failed
    if settings["json"]:
        jobs = [described(outputs_of(folder), row) for row in rows]
        console().result({"verb": BATCH, **counts, "running": running, "jobs": jobs})
        return
    print(f"{counts['done']} of {counts['total']} jobs are done, {failed} failed, {counts['left']} left")
    if running is None:
        print("no batch is at work here")
    else:
        print(f"process {running.get('pid')} on {running.get('host')} is at work")
        if running.get("seconds_left") is not None:
            print(f"about {duration(running['seconds_left'])} left")
    for worker in (running or {}).get("workers", ()):
        print(f"  {worker_line(worker)}")
    for row in rows:
        if row.state in (FAILED, ASIDE):
            what = "was set aside" if row.state == ASIDE else "failed"
            print(f"  job {row.number} ({row.output}) {what}: {row.message}")


def worker_line(doing: Mapping[str, Any]) -> str:
    """What a worker does: "gpu 0: job 3, out/3.mp4, sample 5/20, 40 s left"."""
    from .report import STAGES

    if doing["job"] is None:
        return f"{doing['worker']}: waits"
    stage = STAGES.get(doing["stage"], doing["stage"])
    facts = [f"job {doing['job']}", doing["output"], doing["model"], stage]
    if doing["steps"]:
        facts[-1] += f" {doing['step']}/{doing['steps']}"
    if doing["seconds_left"] is not None:
        facts.append(f"{duration(doing['seconds_left'])} left")
    return f"{doing['worker']}: {', '.join(filter(None, facts))}"
