"""Rules of --fail-above: parsed strictly, judged by the interval's lower end, never open for lack of a number."""

from __future__ import annotations

from dataclasses import replace

import examples
import pytest

from mia_audit.results import AuditResult
from mia_audit.rules import Rule, parse_rule
from shadow_pool.errors import UserError


@pytest.fixture(scope="module")
def result() -> AuditResult:
    return examples.target_audit(examples.digits(300))


def test_a_rule_is_read() -> None:
    assert parse_rule("lira-online:all:tpr@0.01=0.05") == Rule("lira-online", "all", "tpr@0.01", 0.05)
    assert parse_rule(" loss:ood:auc=.6 ") == Rule("loss", "ood", "auc", 0.6)
    assert parse_rule("rmia:all:tpr@1e-2=0") == Rule("rmia", "all", "tpr@0.01", 0.0)
    assert str(parse_rule("rmia:all:epsilon_lower=1.5")) == "rmia:all:epsilon_lower=1.5"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lira-online:all", "a rule must be ATTACK:SUBSET:METRIC=LIMIT"),
        ("all:auc=.5", "a rule must be"),
        (
            "lira-onlin:all:auc=.5",
            "unknown attack in the rule 'lira-onlin': did you mean 'lira-online'.*known: lira-offline",
        ),
        ("loss:odd:auc=.5", "unknown subset in the rule 'odd': did you mean 'ood'"),
        ("loss:all:acc=.5", "unknown metric in the rule 'acc'.*tpr@0.001"),
        ("loss:all:tpr@0.05=.5", "unknown metric in the rule 'tpr@0.05'"),
        ("loss:all:tpr@x=.5", "unknown metric in the rule 'tpr@x'"),
        ("loss:all:auc=high", "the limit of a rule must be a number, got 'high'"),
        ("loss:all:auc=nan", "the limit of a rule must be a share from 0 to 1"),
        ("loss:all:auc=-1", "the limit of a rule must be a share from 0 to 1"),
        ("loss:all:tpr@0.1=5", "the limit of a rule must be a share from 0 to 1, got 5"),
        ("loss:all:epsilon_lower=inf", "the limit of a rule must be a number from 0"),
    ],
)
def test_what_is_no_rule_is_refused(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse_rule(text)


def test_a_rate_that_is_not_resolved_is_doubted(result: AuditResult) -> None:
    row = result.attacks[0]
    points = tuple(replace(point, resolved=point.fpr == 0.1) for point in row.tpr_at_fpr)
    few = replace(result, attacks=(replace(row, tpr_at_fpr=points),))
    doubt = Rule(row.attack, row.subset, "tpr@0.01", 0.05).doubt(few)
    assert doubt is not None
    assert f"{row.nonmembers} non-members do not resolve a false-positive rate of 0.01" in doubt
    assert Rule(row.attack, row.subset, "tpr@0.1", 0.05).doubt(few) is None
    assert Rule(row.attack, row.subset, "auc", 0.5).doubt(few) is None


def test_the_lower_end_decides(result: AuditResult) -> None:
    row = result.attacks[0]
    assert row.auc_ci is not None
    low, high = row.auc_ci
    below, between = Rule("lira-online", "all", "auc", low - 0.01), Rule("lira-online", "all", "auc", (low + high) / 2)
    assert below.exceeded(result)
    assert not between.exceeded(result)
    assert not Rule("lira-online", "all", "auc", low).exceeded(result)
    assert below.sentence(result).endswith(f"{low:.4g}, exceeds the limit {low - 0.01:g}")
    assert "is within the limit" in between.sentence(result)
    point = row.tpr_at_fpr[2]
    assert point.fpr == 0.1
    assert point.ci is not None
    assert Rule("lira-online", "all", "tpr@0.1", point.ci[0] - 1e-6).exceeded(result)
    assert not Rule("lira-online", "all", "tpr@0.1", point.ci[0] + 1e-6).exceeded(result)


def test_epsilon_is_a_lower_bound_already(result: AuditResult) -> None:
    held = replace(result, attacks=(replace(result.attacks[0], epsilon_lower=1.2), *result.attacks[1:]))
    assert Rule("lira-online", "all", "epsilon_lower", 1.0).exceeded(held)
    assert not Rule("lira-online", "all", "epsilon_lower", 1.2).exceeded(held)
    with pytest.raises(UserError, match="needs an epsilon"):
        Rule("lira-online", "all", "epsilon_lower", 1.0).exceeded(result)


def test_a_pool_is_judged_on_the_headlines_arm() -> None:
    pool = examples.pool_audit(examples.digits(300))
    batch = next(row for row in pool.attacks if row.arm == "batch" and row.subset == "all")
    turned = replace(pool, attacks=tuple(reversed(pool.attacks)))
    assert batch.auc_ci is not None
    assert Rule("lira-online", "all", "auc", batch.auc_ci[0] - 1e-6).exceeded(turned)
    assert not Rule("lira-online", "all", "auc", batch.auc_ci[0]).exceeded(turned)


def test_a_gate_does_not_open_for_lack_of_a_number(result: AuditResult) -> None:
    with pytest.raises(UserError, match="needs rmia:all, which this audit does not have; it has lira-online:all"):
        parse_rule("rmia:all:auc=.9").exceeded(result)
    with pytest.raises(UserError, match="none: members unknown"):
        parse_rule("loss:all:auc=.9").exceeded(replace(result, attacks=(), headline=None))
    blind = replace(result, attacks=(replace(result.attacks[0], auc=None, auc_ci=None),))
    with pytest.raises(UserError, match="needs an interval"):
        parse_rule("lira-online:all:auc=.9").exceeded(blind)
