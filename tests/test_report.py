"""report.html: complete, self-contained, escaped, honest, and within its size."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import examples
import numpy as np
import pandas as pd
import pytest

from mia_audit.report import gallery, tables, words
from mia_audit.report.html import write_report, write_study_report
from mia_audit.results import AttackRow, AuditResult, Headline, LayerRatio, TprAtFpr
from shadow_pool.data.records import Records
from shadow_pool.spec import PoolSpec, to_dict

HOSTILE = '<script>alert(1)</script>" onload="x\' & \u202egnp.exe 😀'


class Page(HTMLParser):
    """The tags, the text and the links of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.parts: list[str] = []
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.parts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.parts).split())

    def headings(self) -> list[str]:
        return re.findall(r"<h2[^>]*>(.*?)</h2>", self.source)


@pytest.fixture(scope="module")
def records() -> Records:
    return examples.digits(400)


@pytest.fixture(scope="module")
def target(records: Records) -> AuditResult:
    return examples.target_audit(records)


@pytest.fixture(scope="module")
def page(records: Records, target: AuditResult, tmp_path_factory: pytest.TempPathFactory) -> Page:
    spec = to_dict(PoolSpec(n=16))
    return Page(write_report(target, tmp_path_factory.mktemp("report"), records=records, spec=spec))


def test_sections_stand_in_the_order_in_which_an_auditor_asks(page: Page) -> None:
    assert page.headings() == [
        "Leakage by subset",
        "What BatchNorm does",
        "Who is exposed",
        "How it was measured",
        "How to read this",
        "Limits",
    ]
    assert page.source.index("<h1") < page.source.index("<h2")


def test_the_verdict_carries_the_headline_and_its_interval(page: Page, target: AuditResult) -> None:
    assert target.headline is not None
    low, high = target.headline.ci
    text = page.text.replace("\u00a0", " ")
    assert "This model leaks who was in the training data." in text
    assert f"95 % interval {100 * low:.1f} % to {100 * high:.1f} %" in text


def test_percents_and_intervals_stay_on_one_line(page: Page) -> None:
    prose = re.sub(r"<(svg|style|script)\b.*?</\1>|<[^>]*>", "", page.source, flags=re.DOTALL)
    assert re.search(r"\d\u00a0%", prose)
    assert re.search(r"\[\d\.\d+,\u00a0\d\.\d+\]", prose)
    assert re.search(r"\[[+−]\d\.\d+,\u00a0[+−]\d\.\d+\]", prose)
    assert not re.search(r"\d %|\[[+−]?[\d.]+, ", prose)


def test_other_attacks_are_headed_by_attack_with_arm_and_subset_below(records: Records, target: AuditResult) -> None:
    rows = tables.other_attacks(target)
    assert rows is not None
    assert [(row.head, row.remark) for row in rows.rows][:2] == [("loss", "all"), ("loss", "clean")]
    rows = tables.other_attacks(examples.pool_audit(records))
    assert rows is not None
    assert (rows.rows[0].head, rows.rows[0].remark) == ("lira-online", "none, all")


def test_every_figure_of_numbers_has_a_table(page: Page, target: AuditResult) -> None:
    for words_ in ("The scores as a table", "The differences as tables", "The ratios as a table"):
        assert words_ in page.text
    table = tables.scores(target)
    assert table is not None
    member, score = target.cells["batch"]
    assert table.rows[2].cells[0].text == words.number(float(np.median(score[member])), 2)
    assert table.rows[2].cells[1].text == words.number(float(np.median(score[~member])), 2)


def test_the_policy_allows_only_the_scripts_hash_and_data_pictures(page: Page) -> None:
    policy = next(attrs["content"] for tag, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    scripts = re.findall(r"<script>(.*?)</script>", page.source, flags=re.DOTALL)
    assert len(scripts) == 1
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    assert policy is not None
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "img-src data:;" in policy
    assert not [attrs for _, attrs in page.tags if any(name.startswith("on") for name in attrs)]


def test_nothing_is_loaded_from_outside_the_file(page: Page) -> None:
    for tag, attrs in page.tags:
        assert tag not in ("link", "iframe", "object", "embed", "base", "form")
        for name in ("src", "xlink:href", "href"):
            value = attrs.get(name)
            if value and not (tag == "a" and value.startswith("https://arxiv.org/")):
                assert value.startswith(("#", "data:image/png;base64,")), (tag, name, value[:60])
    assert "url(" not in re.sub(r"url\(#", "", page.source)


def test_ids_are_unique_and_references_meet_them(page: Page) -> None:
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    wanted = {
        attrs[name][1:]
        for _, attrs in page.tags
        for name in ("href", "xlink:href")
        if (attrs.get(name) or "").startswith("#")
    }  # type: ignore[index]
    wanted |= set(re.findall(r"url\(#([^)]*)\)", page.source))
    assert wanted <= set(ids)


def test_every_picture_has_words(page: Page) -> None:
    drawings = [attrs for tag, attrs in page.tags if tag == "svg"]
    assert len(drawings) == 4
    assert all(attrs["role"] == "img" and len(attrs["aria-label"] or "") > 40 for attrs in drawings)
    assert all(attrs["alt"] for tag, attrs in page.tags if tag == "img")


def test_equal_audits_give_equal_bytes(records: Records, target: AuditResult, tmp_path: Path) -> None:
    first = write_report(target, tmp_path / "a", records=records).read_bytes()
    assert first == write_report(target, tmp_path / "b", records=records).read_bytes()


def test_methods_name_threat_model_access_and_fingerprint(page: Page, target: AuditResult) -> None:
    terms = re.findall(r"<dt><bdi>(.*?)</bdi></dt>", page.source)
    assert {"Threat model", "Access", "Population", "Uncertainty", "Query mode", "Evidence"} <= set(terms)
    assert target.pool.fingerprint in page.text
    assert "recipe.weight_decay" in page.text
    assert "https://arxiv.org/abs/2112.03570" in page.source


def test_cards_show_the_true_label_of_a_mislabeled_member(page: Page, records: Records, target: AuditResult) -> None:
    built = gallery.build(target, records)
    assert built is not None
    place = {name: i for i, name in enumerate(records.id)}
    for card in built.cards:
        row = place[card.id]
        assert bool(target.records["member"][row])
        assert card.suspected_label == (str(records.original_label[row]) if card.subset == "mislabeled" else "")
    rates = [card.rate for card in built.cards if card.rate is not None]
    assert len(rates) == len(built.cards)
    assert rates == sorted(rates)
    assert "in truth" in page.text


def test_hostile_text_is_shown_and_never_markup(records: Records, tmp_path: Path) -> None:
    ids = records.id.copy()
    ids[:] = [f"{HOSTILE}{i}" for i in range(len(ids))]
    ids[0] = "x" * 10_000
    ids[1] = "a\x00b\x1b[31m"
    hostile = replace(records, id=ids, classes=tuple(f"{HOSTILE}{i}" for i in range(10)))
    layer = LayerRatio(f"{HOSTILE}$\\frac{{", HOSTILE, 4, 1.0, 1.0, 2.0, 0.5, 1.0)
    result = examples.target_audit(hostile)
    assert result.target is not None
    result = replace(
        result,
        target=replace(result.target, path=f"{HOSTILE}\udc80.pt", arch=HOSTILE, norm_layers={HOSTILE: 1}),
        layers=(layer,),
        warnings=(HOSTILE,),
        software={HOSTILE: HOSTILE},
    )
    path = write_report(result, tmp_path, records=hostile, spec={HOSTILE: {HOSTILE: HOSTILE}})
    page = Page(path)
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert "alert(1)" not in "".join(re.findall(r"<script.*?</script>", page.source, flags=re.DOTALL))
    assert "<script>alert(1)</script>" in page.text
    assert "x" * 200 not in page.text
    assert "(10,000 characters)" in page.text
    assert not re.search("[\x00-\x08\x0e-\x1f]", page.source)


def test_a_pool_of_64_models_and_5000_records_stays_under_3_megabytes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    base = examples.digits(1500)
    big = base.take(np.arange(5000) % 1500)
    big = replace(
        big,
        x=rng.integers(0, 256, (5000, 3, 64, 64), dtype=np.uint8),
        id=np.array([f"picture-{i}" for i in range(5000)], dtype=object),
    )
    result = examples.pool_audit(big, n=64, arms=("batch", "none", "none+fit"))
    assert write_report(result, tmp_path, records=big).stat().st_size < 3_000_000


def test_a_model_that_leaks_nothing_gets_no_claim(records: Records, tmp_path: Path) -> None:
    result = examples.target_audit(records, leak=0)
    page = Page(write_report(result, tmp_path, records=records))
    assert "No leakage resolved." in page.text
    assert "no proof of safety" in page.text
    assert "leaks who" not in page.text


def _audit(
    records: Records, *, tpr: float, ci: tuple[float, float], auc_ci: dict[str, tuple[float, float]]
) -> AuditResult:
    rows = tuple(
        AttackRow("lira-online", "batch", subset, 500, 500, sum(span) / 2, span, 0.5, (TprAtFpr(0.01, tpr, ci, True),))
        for subset, span in auc_ci.items()
    )
    headline = Headline("lira-online", "batch", "all", 0.01, tpr, ci)
    return replace(examples.target_audit(records), attacks=rows, headline=headline)


def test_verdicts_follow_the_intervals(records: Records) -> None:
    chance, above = (0.47, 0.53), (0.6, 0.7)
    leaking = _audit(records, tpr=0.2, ci=(0.1, 0.3), auc_ci={"all": above})
    assert words.verdict(leaking).level == "leaks"
    touching = _audit(records, tpr=0.02, ci=(0.01, 0.03), auc_ci={"all": chance, "clean": chance})
    assert words.verdict(touching).level == "unresolved"
    outliers = _audit(records, tpr=0.02, ci=(0.0, 0.03), auc_ci={"all": chance, "ood": above})
    assert words.verdict(outliers).level == "partly"
    assert "out-of-distribution records" in words.verdict(outliers).title
    below = _audit(records, tpr=0.001, ci=(0.0, 0.004), auc_ci={"all": chance})
    assert "above that interval" in words.verdict(below).sentence


def test_leakage_that_another_attack_finds_is_not_passed_over(records: Records) -> None:
    chance, above = (0.45, 0.53), (0.63, 0.73)
    blind = _audit(records, tpr=0.02, ci=(0.0, 0.03), auc_ci={"all": chance})
    other = replace(blind.attacks[0], attack="loss", auc=0.68, auc_ci=above)
    seen = words.verdict(replace(blind, attacks=(*blind.attacks, other)))
    assert seen.title == "This model leaks, though not by lira-online."
    assert "loss (AUC 0.680 [0.630, 0.730])" in seen.sentence
    weak = replace(other, auc=0.53, auc_ci=(0.505, 0.555))  # one of five intervals at 95 % may err
    assert words.verdict(replace(blind, attacks=(*blind.attacks, weak))).level == "unresolved"


def test_a_verdict_does_not_contradict_itself(records: Records) -> None:
    above = (0.6, 0.7)
    found = words.verdict(_audit(records, tpr=0.02, ci=(0.0, 0.03), auc_ci={"all": above, "clean": above}))
    assert found.level == "partly"
    assert found.title == "This model leaks: scores tell members from others, though not at this false-positive rate."


def test_a_recommendation_without_intervals_says_so(records: Records) -> None:
    result = examples.pool_audit(records)
    bare = tables.recommendation(replace(result, arms=tuple(replace(arm, auc_ci=None) for arm in result.arms)))
    assert "no intervals to compare" in bare
    assert "overlap" not in bare
    assert " ," not in bare


def _with_rates(records: Records, rates: dict[str, float], members: bool = False) -> AuditResult:
    """An audit of 4,000 non-members (or members) whose rates are uniform on (0, 1] times a factor by subset."""
    subset = np.repeat(list(rates), 4000 // len(rates))
    rng = np.random.default_rng(0)
    rate = rng.permuted(np.linspace(1 / 4000, 1, len(subset))) * np.array([rates[name] for name in subset])
    table = pd.DataFrame({"subset": subset, "false_positive_rate": rate})
    table["member"] = pd.array([members] * len(table), dtype="boolean")
    return replace(examples.target_audit(records), records=table)


def test_rates_that_hold_are_said_to_and_others_are_named_by_subset(records: Records) -> None:
    table, sentence = tables.calibration(_with_rates(records, {"clean": 1.0, "ood": 1.0}))
    assert table is not None
    assert [row.head for row in table.rows] == ["all", "clean", "ood"]
    assert table.rows[0].cells[1].text == "10.0 %"
    assert "these rates hold" in sentence
    table, sentence = tables.calibration(_with_rates(records, {"clean": 1.0, "ood": 0.3}))
    assert "do not hold everywhere" in sentence
    assert "of out-of-distribution records for 10 %" in sentence
    assert "of clean records" not in sentence


def test_rates_are_not_checked_without_non_members(records: Records) -> None:
    assert tables.calibration(_with_rates(records, {"clean": 1.0}, members=True)) == (None, "")
    assert tables.calibration(examples.target_audit(records, members_known=False)) == (None, "")
    assert tables.calibration(examples.pool_audit(records)) == (None, "")


def test_unknown_members_give_scores_and_no_rates(records: Records, tmp_path: Path) -> None:
    result = examples.target_audit(records, members_known=False, bn=False)
    page = Page(write_report(result, tmp_path, records=records))
    assert "Leakage not measured: the members are not known." in page.text
    assert "This model has no BatchNorm layer" in page.text
    built = gallery.build(result, records)
    assert built is not None
    assert not built.members_only
    assert built.total == len(records)


def test_scores_that_are_not_numbers_are_left_out(records: Records, target: AuditResult, tmp_path: Path) -> None:
    frame = target.records.copy()
    frame.loc[:5, "lira-online"] = np.nan
    member, score = target.cells["batch"]
    score = np.where(np.arange(len(score)) < 6, np.nan, score)
    row = AttackRow("lira-online", "batch", "all", 3, 0, None, None, None, (TprAtFpr(0.01, None, None, False),))
    result = replace(target, records=frame, cells={"batch": (member, score)}, attacks=(row,), headline=None, layers=())
    page = Page(write_report(result, tmp_path, records=records))
    assert not re.search(r"\bnan\b", page.text)
    assert words.NOTHING in page.text
    assert not {str(name) for name in records.id[:6]} & {card.id for card in gallery.build(result, records).cards}  # type: ignore[union-attr]


def test_records_in_another_order_are_refused(records: Records, target: AuditResult, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="same order"):
        write_report(target, tmp_path, records=records.take(np.arange(len(records))[::-1]))


def test_the_recommendation_weighs_leakage_against_accuracy(records: Records) -> None:
    result = examples.pool_audit(records)
    assert "batch+penalty(1) (BatchNorm, gamma/sigma penalty 1) leaks least" in tables.recommendation(result)
    worse = tuple(replace(arm, test_accuracy=0.2) if arm.arm != "batch" else arm for arm in result.arms)
    assert tables.recommendation(replace(result, arms=worse)).startswith("No other arm")
    untrained = tuple(replace(arm, trained=arm.arm in ("batch", "none+fit")) for arm in result.arms)
    assert "none+fit" in tables.recommendation(replace(result, arms=untrained))


def test_thumbnails_are_small_pictures_of_any_image() -> None:
    rng = np.random.default_rng(0)
    for image in (
        rng.integers(0, 256, (1, 8, 8), dtype=np.uint8),
        rng.integers(0, 256, (3, 224, 200), dtype=np.uint8),
        rng.normal(size=(2, 9, 9)).astype(np.float32),
        np.full((3, 4, 4), np.nan, dtype=np.float32),
    ):
        assert gallery.thumbnail(image).startswith("data:image/png;base64,iVBOR")


def test_features_are_summed_up_by_what_stands_out() -> None:
    x = np.zeros((100, 4), dtype=np.float32)
    x[:, 0] = np.linspace(-1, 1, 100)
    x[7, 2] = 5.0
    (text,) = gallery.feature_summaries(x, np.array([7]))
    assert text.startswith("feature 2: 5 (+9.9 sd); feature 0: -0.859 (-1.5 sd)")


def test_text_of_unknown_origin_is_cut_and_visible() -> None:
    assert words.shown("a\x00b") == "a�b"
    assert words.shown("y" * 500, 10) == "y" * 10 + "… (500 characters)"
    assert words.shown("ok", 10) == "ok"


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (words.number(-0.5), "−0.500"),
        (words.number(float("nan")), words.NOTHING),
        (words.signed(0.2131), "+0.213"),
        (words.percent(0.2234), "22.3 %"),
        (words.points(-0.175), "−17.5"),
        (words.interval((0.7, 0.8)), "[0.700, 0.800]"),
        (words.interval((-0.012, 0.03), 1, scale=100, plus=True), "[−1.2, +3.0]"),
        (words.interval(None), ""),
        (words.at(20.0), "20"),
        (words.at(None), words.NOTHING),
        (words.small(1.0), "100 %"),
        (words.small(0.00034), "0.034 %"),
        (words.metric_words("tpr@0.001"), "TPR at 0.1 % FPR"),
        (words.arm_words("none+fit"), "no normalization, trained on to equal fit"),
        (words.arm_words("group+dp(8)"), "GroupNorm, DP-SGD, epsilon 8"),
    ],
)
def test_numbers_and_names_are_written_so(made: str, expected: str) -> None:
    assert made == expected


def test_effects_are_worded_by_their_intervals(records: Records) -> None:
    row = examples.pool_audit(records).effect[0]
    assert "BatchNorm adds" in words.effect_sentence(replace(row, difference=0.1, ci=(0.05, 0.15)))
    assert "no effect of BatchNorm resolved" in words.effect_sentence(replace(row, difference=0.1, ci=(-0.05, 0.25)))
    assert "BatchNorm lowers" in words.effect_sentence(replace(row, difference=-0.1, ci=(-0.2, -0.05)))
    assert "no interval" in words.effect_sentence(replace(row, ci=None))


def test_a_study_writes_its_three_files(tmp_path: Path) -> None:
    study = examples.study()
    study.write(tmp_path)
    write_study_report(study, tmp_path)
    page = Page(tmp_path / "report.html")
    assert page.headings() == ["Claims and verdicts", "Figures", "All numbers", "How it was measured"]
    assert all(text in page.text for text in ("holds", "not resolved", "does not hold", study.summary))
    figures = re.findall(r"<svg role.*?</svg>", page.source, flags=re.DOTALL)
    assert figures
    assert not any(re.search(r"#[0-9a-f]{6}\b", figure) for figure in figures)  # every colour follows the theme
    frame = pd.read_parquet(tmp_path / "study.parquet")
    assert list(frame["verdict"][:3]) == ["holds", "not resolved", "does not hold"]
    assert frame["ci_low"][0] == 0.93


def test_a_studys_verdicts_are_counted_and_its_summary_read_in_parts() -> None:
    study = examples.study()
    assert words.tally(study.rows) == "1 of 3 verdicts holds, 1 does not, 1 is not resolved."
    assert words.tally(study.rows[:1] * 8) == "8 of 8 verdicts hold."
    assert words.tally(study.rows[1:3] * 2) == "0 of 4 verdicts hold, 2 do not, 2 are not resolved."
    assert words.tally(study.rows[3:]).startswith("Nothing was judged")
    summary = "Holds: a leaks (all); b leaks. Not resolved: c at 0.5 leaks. Recommended: none."
    assert words.findings(summary) == [
        ("Holds", "a leaks (all); b leaks."),
        ("Not resolved", "c at 0.5 leaks."),
        ("Recommended", "none."),
    ]
    assert words.findings("One plain sentence.") == [("", "One plain sentence.")]


def test_a_studys_numbers_are_of_any_size() -> None:
    found = [words.measure(value) for value in (None, 0, -0.44639, 17, -1234.56, 2.4e-15, -1e-4)]
    assert found == ["–", "0.000", "−0.446", "17.0", "−1234.6", "2.4e−15", "−1.0e−04"]


def test_a_study_report_shows_hostile_text(tmp_path: Path) -> None:
    study = examples.study()
    study = replace(study, name=HOSTILE, summary=HOSTILE, rows=(replace(study.rows[0], claim=HOSTILE, at=HOSTILE),))
    page = Page(write_study_report(study, tmp_path))
    assert "script" not in [tag for tag, _ in page.tags]
    assert "<script>alert(1)</script>" in page.text
