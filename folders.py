"""Checkpoint folders: whole or not there.

One is written under another name, flushed to the disk and renamed; manifest.json lists its files with their sizes, and what disagrees with it
is no checkpoint.
"""
import json
import os
import shutil
from itertools import count
from pathlib import Path

MANIFEST = "manifest.json"


def step_of(folder: Path) -> int:
    number = folder.name.removeprefix("checkpoint-")
    return int(number) if number.isdigit() else -1


def found(output: Path) -> list[Path]:
    """The oldest first."""
    return sorted((folder for folder in output.glob("checkpoint-*") if step_of(folder) >= 0), key=step_of)


def newest(output: Path) -> Path | None:
    return next(reversed(found(output)), None)


def defect(folder: Path) -> str | None:
    """Why a folder is no checkpoint to resume from, or None."""
    if not (folder / MANIFEST).is_file():
        return f"it has no {MANIFEST}, which every checkpoint of this program has"
    try:
        sizes = json.loads((folder / MANIFEST).read_text())
    except ValueError:
        return f"its {MANIFEST} is not whole"
    for name, size in sizes.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            return f"its {name} " + (f"has {path.stat().st_size} bytes instead of {size}" if path.is_file() else "is missing")
    return None if (folder / "trainer_state.json").is_file() else f"it holds the model only (save_only_model): start from its weights with model={folder}"


def publish(partial: Path, folder: Path) -> None:
    """List the files, flush all to the disk, and only then give the folder its name."""
    sizes = {str(path.relative_to(partial)): path.stat().st_size for path in partial.rglob("*") if path.is_file()}
    (partial / MANIFEST).write_text(json.dumps(sizes, indent=1))
    for path in (*partial.rglob("*"), partial):
        flush(path)
    shutil.rmtree(folder, ignore_errors=True)            # of the same step: a run that was resumed from an earlier one
    partial.rename(folder)
    flush(folder.parent)


def set_aside(output: Path, step: int) -> None:
    """Move what other runs left in `output` beyond `step` to earlier_<n>: the newest checkpoint must be this run's own."""
    others = [folder for folder in found(output) if step_of(folder) > step] + [path for path in [output / "rollouts"] if step == 0 and path.exists()]
    target = next(path for n in count(1) if not (path := output / f"earlier_{n}").exists())
    for path in others:
        target.mkdir(exist_ok=True)
        path.rename(target / path.name)
        print(f"{path} is of another run: moved to {target}", flush=True)


def clear(output: Path) -> None:
    """Remove what a save left that was cut short, an adapter's own unfinished folder too."""
    for left_over in output.glob("*checkpoint-*.partial*"):
        shutil.rmtree(left_over, ignore_errors=True)


def flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def prune(output: Path, limit: int | None) -> None:
    """Delete all but the newest, each under a name that nobody resumes from."""
    for folder in found(output)[:-limit] if limit else ():
        doomed = folder.with_suffix(".partial")
        folder.rename(doomed)
        shutil.rmtree(doomed)
