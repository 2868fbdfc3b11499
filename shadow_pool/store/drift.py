"""What changed between the models of a pool, and since: they are comparable to the bit on one machine and software."""

from __future__ import annotations

from collections import Counter

from shadow_pool.store.manifest import software_versions
from shadow_pool.store.pool import Pool
from shadow_pool.store.trust import MODEL_FIELDS, code_versions

DECISIVE = ("machine", "torch", "numpy", "kernels")
"""The entries of ``software`` that change a model's bits, besides the code that the spec names."""


def drift_warnings(pool: Pool, *, device: str = "cpu", here: bool) -> tuple[str, ...]:
    """Warnings where the pool's models come from different processors or versions.

    Args:
        device: what this process computes on.
        here: also warn where they differ from this process's, which is about to train or to compute signals.
    """
    models = [info.software for arm in pool.spec.arms for info in pool.scan(arm)[0].values()]
    code = code_versions(pool.spec, MODEL_FIELDS)
    now = software_versions(device) | code if here else {}
    warnings = []
    for name in (*DECISIVE, *code):
        counts = Counter(software.get(name, "unknown") for software in models)
        if len(counts) > 1:
            shares = ", ".join(f"{value} ({count} models)" for value, count in counts.most_common())
            warnings.append(
                f"the models of {pool.path} were trained with different {name}: {shares}; their differences may in "
                "part be the software's: train one pool with one version on one type of processor"
            )
        if counts and name in now and now[name] not in counts:
            theirs = counts.most_common(1)[0][0]
            warnings.append(
                f"the models of {pool.path} were trained with {name} {theirs}, this is {now[name]}: what is computed "
                "here is not the same to the bit"
            )
    return tuple(warnings)
