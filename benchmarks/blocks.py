"""Scoring a pool that does not fit in memory: time, peak memory, and how both grow with records and models.

A synthetic pool is written as training would write it (normal phi, one query), by default 1,000,000 records x 256
models: 6 GB. Then a target is scored by all of it or by a part, each time in a fresh process: alone, by two processes
(joblib's loky), by two Dask workers on loopback. ``check`` is the reading and hashing of the models' files before
anything is believed, ``score`` the attack. Seconds by the clock; peak resident memory of the process that scores,
and of the largest worker. Last, how long it takes to read a whole pool of 256 models x 50,000 records into memory.

Measured 2026-11-30 on 2 cores of a virtual x86-64 machine with nothing else running, one run each, files in the cache:

    lira-online  1,000,000 records x 256 models, alone      check   4.3 s  score  16.3 s  peak 1.23 GB
    rmia         1,000,000 records x 256 models, alone      check   3.9 s  score  34.7 s  peak 1.11 GB
    reference    1,000,000 records x 256 models, alone      check   4.1 s  score  22.6 s  peak 1.11 GB
    loss         1,000,000 records x 256 models, alone      check   3.9 s  score   0.0 s  peak 1.11 GB
    lira-online    500,000 records x 256 models, alone      check   3.8 s  score   8.4 s  peak 1.11 GB
    lira-online    250,000 records x 256 models, alone      check   4.3 s  score   5.1 s  peak 1.11 GB
    lira-online  1,000,000 records x 128 models, alone      check   2.0 s  score   8.2 s  peak 1.19 GB
    lira-online  1,000,000 records x  64 models, alone      check   1.0 s  score   3.4 s  peak 1.19 GB
    lira-online  1,000,000 records x 256 models, processes  check   4.3 s  score   9.5 s  peak 1.23 GB, workers 0.27 GB
    rmia         1,000,000 records x 256 models, processes  check   4.1 s  score  19.7 s  peak 1.11 GB, workers 0.26 GB
    lira-online  1,000,000 records x 256 models, dask       check   4.9 s  score  12.9 s  peak 1.29 GB, workers 0.31 GB
    rmia         1,000,000 records x 256 models, dask       check   4.8 s  score  28.1 s  peak 1.11 GB, workers 0.30 GB
    evidence of 50,000 records x 256 models, first: 1.24 s, second: 1.36 s

so that time grows in proportion to records and to models; of the memory, 0.55 GB are libraries and 0.26 GB membership.

Run: python benchmarks/blocks.py [--folder DIR]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pyarrow as pa
import torch

from mia_audit.attacks import target_scores
from mia_audit.evidence import load_evidence
from shadow_pool.data.records import PoolData, Records
from shadow_pool.signals import Signals
from shadow_pool.spec import from_dict
from shadow_pool.store.entry import EntryInfo, commit_entry, workspace
from shadow_pool.store.grow import create_pool
from shadow_pool.store.pool import Pool, open_pool

CLASSES = tuple("0123456789")
POPULATION = 2000


def some_records(count: int, first: int) -> Records:
    return Records(
        x=np.zeros((count, 1), dtype=np.float32),
        label=np.arange(count) % 10,
        id=np.arange(first, first + count).astype(str).astype(object),
        original_label=np.arange(count) % 10,
        subset=np.full(count, "clean", dtype=object),
        subset_source=np.full(count, None, dtype=object),
        source_index=np.arange(count),
        group=None,
        classes=CLASSES,
    )


def make_pool(path: Path, models: int, records: int) -> Pool:
    """A pool whose members have a phi that is higher by 1; what is there already is kept."""
    data = {"source": "synthetic", "normalize": "none", "classes": list(CLASSES)}
    spec = from_dict({"n": models, "arms": ["batch"], "arch": "mlp", "precision": "fp32", "data": data})
    if not (path / "pool.json").exists():
        create_pool(path, spec, PoolData(some_records(records, 0), some_records(POPULATION, records)))
    pool = open_pool(path)
    for index in pool.missing("batch"):
        rng = np.random.default_rng(index)
        everyone, population = (
            Signals(
                phi=rng.standard_normal((count, 1)),
                predicted=rng.integers(0, 10, count),
                predicted_probability=rng.random(count, dtype=np.float32),
                energy=rng.random(count, dtype=np.float32),
            )
            for count in (records, POPULATION)
        )
        everyone.phi[pool.membership[index]] += 1
        entry = pool.entry("batch", index)
        entry.parent.mkdir(parents=True, exist_ok=True)
        info = EntryInfo(
            arm="batch",
            index=index,
            seed=0,
            status="trained",
            seconds=0.0,
            epochs=1,
            loss=0.1,
            reached=None,
            epsilon=None,
            member_accuracy=0.9,
            nonmember_accuracy=0.8,
            population_accuracy=0.8,
            digest=pool.manifest.digest,
            software={},
        )
        with workspace(entry):
            commit_entry(
                entry,
                info,
                state={"weight": torch.zeros(1)},
                records=everyone,
                population=population,
                history=pa.table({"epoch": [1]}),
            )
    return pool


def peak() -> float:
    """GB, of this process alone (Linux; getrusage's would start from that of the parent)."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split("VmHWM:")[1].split()[0]) / 1e6


@contextmanager
def workers(where: str) -> Iterator[list[float]]:
    """joblib's configuration, and in the end the peak memory of each worker."""
    peaks: list[float] = []
    if where == "alone":
        yield peaks
    elif where == "processes":
        with joblib.parallel_config(backend="loky", n_jobs=2, inner_max_num_threads=1):
            everyone = joblib.Parallel(batch_size=1, max_nbytes=None)  # else joblib starts other workers
            everyone(joblib.delayed(peak)() for _ in range(2))
            yield peaks
            peaks += everyone(joblib.delayed(peak)() for _ in range(8))
    else:
        from distributed import Client
        from distributed.deploy.subprocess import SubprocessCluster

        with SubprocessCluster(n_workers=2, threads_per_worker=1) as cluster, Client(cluster) as client:
            client.wait_for_workers(2)
            with joblib.parallel_config(backend="dask"):
                yield peaks
            peaks += client.run(peak).values()


def score(path: Path, attack: str, where: str, models: int, records: int) -> None:
    pool = open_pool(path)
    member = pool.membership[:models, :records]
    rng = np.random.default_rng(1_000_000)
    target, population = rng.standard_normal((records, 1)), rng.standard_normal((POPULATION, 1))
    with workers(where) as peaks:
        start = time.perf_counter()
        phi = pool.phi("batch", range(models))[:, :records]
        outside = pool.phi("batch", range(models), population=True)
        checked = time.perf_counter()
        ask: dict[str, Any] = {"population_target_phi": population, "population_shadow_phi": outside}
        found = target_scores(attack, target, phi, member, **ask)
        end = time.perf_counter()
    assert np.isfinite(found).all()
    print(
        f"{attack:12s} {records:9,d} records x {models:3d} models, {where:9s}  check {checked - start:5.1f} s  "
        f"score {end - checked:5.1f} s  peak {peak():.2f} GB" + (f", workers {max(peaks):.2f} GB" if peaks else ""),
        flush=True,
    )


def read(path: Path) -> None:
    for attempt in ("first", "second"):
        start = time.perf_counter()
        evidence = load_evidence(open_pool(path), "batch")
        spent = time.perf_counter() - start
        print(f"evidence of {evidence.phi.shape[1]:,} records x {len(evidence.phi)} models, {attempt}: {spent:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=256)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, help="where pools are made and kept (default: a temporary folder)")
    parser.add_argument("--score", nargs=2, metavar=("ATTACK", "WHERE"), help=argparse.SUPPRESS)
    parser.add_argument("--read", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.score:
        score(options.folder, *options.score, options.models, options.records)
    elif options.read:
        read(options.folder)
    else:
        with tempfile.TemporaryDirectory() as temporary:
            measure(options.folder or Path(temporary), options.models, options.records)


def measure(folder: Path, models: int, records: int) -> None:
    def afresh(pool: str, *arguments: Any) -> None:
        command = [sys.executable, __file__, "--folder", folder / pool, *arguments]
        subprocess.run([str(part) for part in command], check=True)

    def scored(attack: str, where: str, *, of: int = 1, of_models: int = 1) -> None:
        size = ("--models", models // of_models, "--records", records // of)
        afresh("large", "--score", attack, where, *size)

    make_pool(folder / "small", models, records // 20)
    afresh("small", "--read")
    make_pool(folder / "large", models, records)
    for attack in ("lira-online", "rmia", "reference", "loss"):
        scored(attack, "alone")
    for part in (2, 4):
        scored("lira-online", "alone", of=part)
        scored("lira-online", "alone", of_models=part)
    for where in ("processes", "dask"):
        for attack in ("lira-online", "rmia"):
            scored(attack, where)


if __name__ == "__main__":
    main()
