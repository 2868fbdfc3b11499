import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pools import tiny_pool, train_here
from torch import nn
from torch.nn import functional as F

from shadow_pool.arms import parse_arm
from shadow_pool.models.resolve import build_model
from shadow_pool.spec import Recipe
from shadow_pool.train.history import at_chance
from shadow_pool.train.job import TrainingData, TrainingJob
from shadow_pool.train.loop import FIT_LIMIT, Training, train_model
from shadow_pool.train.recipe import Optimizer, augment_epoch, batch_bounds, learning_rate, make_optimizer
from shadow_pool.train.unit import Unit, train_units


def scaled(batch):
    return batch.float() / 255


def digits_like(count, classes=10, seed=0):
    rng = np.random.default_rng(seed)
    label = np.arange(count) % classes
    x = rng.integers(0, 60, (count, 1, 8, 8)).astype(np.uint8)
    x[np.arange(count), 0, label % 8, :] = 250
    return x, label.astype(np.int64)


def lenet(norm="batch", classes=10, seed=0):
    return build_model("lenet", norm, classes=classes, input_shape=(1, 8, 8), seed=seed)


def train(model, x, label, arm="batch", *, on_epoch=None, fit_loss=None, index=0, seed=0, **recipe):
    job = TrainingJob(
        arm=parse_arm(arm),
        recipe=Recipe(**{"epochs": 2, "batch_size": 8, "lr": 0.05, **recipe}),
        seed=seed,
        index=index,
        fit_loss=fit_loss,
    )
    return train_model(Training(model, x, label, job, on_epoch), preprocess=scaled)


class Net(nn.Module):
    """Notes every batch it sees in training."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 10)
        self.batches = []

    def forward(self, x):
        if self.training:
            self.batches.append(x.detach().clone())
        return self.linear(x.flatten(1))


def flat_state(model):
    return torch.cat([value.flatten().float() for value in model.state_dict().values()])


# ------------------------------------------------------------------ recipe


def test_learning_rates_of_the_three_schedules():
    cosine, step, constant = (Recipe(lr=0.4, schedule=name) for name in ("cosine", "step", "constant"))
    assert [learning_rate(cosine, s, 4) for s in range(4)] == pytest.approx(
        [0.4 * (1 + math.cos(math.pi * s / 4)) / 2 for s in range(4)]
    )
    assert [learning_rate(step, s, 8) for s in range(8)] == pytest.approx([0.4] * 4 + [0.04] * 2 + [0.004] * 2)
    assert {learning_rate(constant, s, 3) for s in range(3)} == {0.4}


@given(st.integers(0, 500), st.integers(1, 50), st.sampled_from(["cosine", "step", "constant"]))
def test_beyond_its_end_a_schedule_starts_anew(step, steps, name):
    recipe = Recipe(schedule=name)
    assert learning_rate(recipe, step, steps) == learning_rate(recipe, step + steps, steps)


@given(st.integers(1, 300), st.integers(2, 70))
def test_batches_cover_the_epoch_in_order_and_none_is_a_single_record(records, batch_size):
    bounds = batch_bounds(records, batch_size)
    assert [i for start, stop in bounds for i in range(start, stop)] == list(range(records))
    sizes = [stop - start for start, stop in bounds]
    assert min(sizes) >= min(records, 2)
    assert max(sizes) <= batch_size + 1


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_the_optimizer_moves_parameters_as_torchs_own_does(optimizer, momentum):
    recipe = Recipe(optimizer=optimizer, momentum=momentum, weight_decay=0.01)
    states = []
    for ours in (True, False):
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), torch.randn(8, 5)
        model[0].bias.requires_grad_(False)
        optimizer_ = Optimizer(model, recipe) if ours else make_optimizer(model, recipe)
        for lr in (0.1, 0.03, 0.2, 0.01):
            model(x).square().sum().backward()
            if ours:
                optimizer_.step(lr)
                assert all(p.grad is None for p in model.parameters())
            else:
                optimizer_.param_groups[0]["lr"] = lr
                optimizer_.step()
                optimizer_.zero_grad()
        states.append(flat_state(model))
    assert torch.equal(*states)


def test_gradients_are_clipped_to_their_joint_norm():
    model = nn.Linear(3, 1, bias=False)
    optimizer = Optimizer(model, Recipe(gradient_clip=0.5, momentum=0.0, weight_decay=0.0))
    before = model.weight.detach().clone()
    (model.weight * torch.tensor([[3.0, 4.0, 0.0]])).sum().backward()
    optimizer.step(1.0)
    assert torch.allclose(before - model.weight.detach(), torch.tensor([[0.3, 0.4, 0.0]]), atol=1e-5)


def test_a_parameter_that_no_output_depends_on_stays():
    model = nn.ModuleDict({"used": nn.Linear(2, 1), "unused": nn.Linear(2, 1)})
    before = model["unused"].weight.detach().clone()
    optimizer = Optimizer(model, Recipe())
    for _ in range(2):
        model["used"](torch.ones(1, 2)).sum().backward()
        optimizer.step(0.1)
    assert torch.equal(model["unused"].weight, before)


def test_augmentation_moves_each_image_by_itself_and_leaves_features_alone():
    x = torch.zeros(200, 1, 8, 8)
    x[:, :, 4, 3] = 1
    moved = augment_epoch(x, Recipe(augmentation="shift"), np.random.default_rng(0))
    where = moved.flatten(1).argmax(1)
    assert {(int(w) // 8 - 4, int(w) % 8 - 3) for w in where} == {(a, b) for a in (-1, 0, 1) for b in (-1, 0, 1)}
    flipped = augment_epoch(x, Recipe(augmentation="flip-shift"), np.random.default_rng(0)).flatten(1).argmax(1) % 8
    assert set(flipped.tolist()) == {2, 3, 4, 5}
    assert augment_epoch(x, Recipe(), np.random.default_rng(0)) is x
    features = torch.rand(5, 7)
    assert augment_epoch(features, Recipe(augmentation="shift"), np.random.default_rng(0)) is features


# ------------------------------------------------------------------ loop


def test_training_learns_and_reports_the_last_epochs_mean_loss():
    x, label = digits_like(64)
    losses = []
    model = lenet()
    outcome = train(model, x, label, epochs=8, on_epoch=lambda epoch, model, loss: losses.append((epoch, loss)))
    assert [epoch for epoch, _ in losses] == list(range(1, 9))
    assert losses[-1][1] < 0.3 * losses[0][1]
    assert (outcome.epochs, outcome.loss, outcome.diverged, outcome.reached) == (8, losses[-1][1], False, None)


def test_the_reported_loss_is_the_mean_over_records_not_batches():
    x, label = digits_like(11)
    model = Net()
    reference = {name: value.clone() for name, value in model.state_dict().items()}
    outcome = train(model, x, label, "none", lr=1e-9, epochs=1, weight_decay=0.0)
    model.load_state_dict(reference)
    with torch.no_grad():
        expected = F.cross_entropy(model(scaled(torch.from_numpy(x))), torch.from_numpy(label))
    assert outcome.loss == pytest.approx(float(expected), rel=1e-5)


def test_equal_arguments_give_equal_bits_and_the_index_changes_the_order():
    x, label = digits_like(40)
    states = []
    for index in (0, 0, 1):
        model = lenet()
        train(model, x, label, index=index)
        states.append(flat_state(model))
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


def test_the_global_generator_is_neither_read_nor_moved():
    x, label = digits_like(24)
    states, after = [], []
    for noise in (1, 2):
        torch.manual_seed(noise)
        np.random.seed(noise)  # noqa: NPY002 (the global generator is what is tested)
        model = lenet()
        train(model, x, label)
        states.append(flat_state(model))
        torch.manual_seed(0)
        after.append(torch.rand(1))
    assert torch.equal(*states)
    assert torch.equal(*after)


def test_arms_are_paired_same_shared_initial_weights_and_same_batches():
    ours, theirs = lenet("batch", seed=3).state_dict(), lenet("none", seed=3).state_dict()
    shared = [name for name in ours if name in theirs and name.endswith("weight") and ours[name].ndim > 1]
    assert len(shared) >= 4
    assert all(torch.equal(ours[name], theirs[name]) for name in shared)
    x, label = digits_like(30)
    seen = []
    for arm in ("batch", "none", "batch+penalty(1)"):
        net = Net()
        if arm == "batch+penalty(1)":
            net.norm = nn.BatchNorm1d(3)
        train(net, x, label, arm, augmentation="shift")
        seen.append(net.batches)
    for batches in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], batches, strict=True))


def test_a_fit_arm_trains_on_until_it_reaches_its_loss():
    x, label = digits_like(48)
    losses = []

    def note(epoch, model, loss):
        losses.append(loss)

    outcome = train(lenet("none"), x, label, "none+fit", fit_loss=1.0, on_epoch=note, optimizer="adamw", lr=0.01)
    assert outcome.reached
    assert outcome.epochs > 2
    assert losses[-1] <= 1.0 < min(losses[:-1])


def test_a_fit_arm_gives_up_at_ten_times_the_epochs():
    x, label = digits_like(16)
    outcome = train(lenet("none"), x, label, "none+fit", fit_loss=-1.0)
    assert (outcome.epochs, outcome.reached, outcome.diverged) == (2 * FIT_LIMIT, False, False)


def test_a_fit_arm_whose_batch_model_diverged_trains_as_others_do():
    x, label = digits_like(16)
    outcome = train(lenet("none"), x, label, "none+fit", fit_loss=None)
    assert (outcome.epochs, outcome.reached) == (2, False)


@pytest.mark.parametrize("count", [9, 17, 2, 3])
def test_a_last_batch_of_one_record_does_not_stop_batchnorm(count):
    x, label = digits_like(count)
    assert not train(lenet(), x, label).diverged


def test_a_loss_that_is_not_finite_ends_training_and_is_reported():
    x, label = digits_like(32)
    seen = []
    outcome = train(lenet("none"), x, label, lr=1e5, epochs=6, on_epoch=lambda epoch, model, loss: seen.append(epoch))
    assert outcome.diverged
    assert not math.isfinite(outcome.loss)
    assert len(seen) < outcome.epochs <= 6


def test_single_logit_models_train_on_two_classes():
    class Single(Net):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 1)

    x, label = digits_like(40, classes=2)
    model = Single()
    assert train(model, x, label, epochs=20).loss < 0.3


def test_constant_channels_and_labels_of_one_class_do_not_crash():
    x, label = np.full((20, 1, 8, 8), 7, np.uint8), np.zeros(20, np.int64)
    assert not train(lenet(classes=2), x, label).diverged


def test_chance_is_the_largest_class():
    label = np.repeat([0, 1], [70, 30])
    correct = np.zeros(100, bool)
    assert at_chance(correct, label)
    correct[:75] = True
    assert at_chance(correct, label)
    correct[:95] = True
    assert not at_chance(correct, label)
    assert at_chance(np.ones(50, bool), np.zeros(50, np.int64))
    assert at_chance(np.zeros(0, bool), np.zeros(0, np.int64))


# ------------------------------------------------------------------ units


def statuses(pool, arm):
    return {info.status for info in pool.scan(arm)[0].values()}


def test_statuses_diverged_and_chance_are_stored_and_their_fit_partner_still_trains(tmp_path):
    pool, data = tiny_pool(tmp_path / "p", {"recipe": {"optimizer": "sgd", "lr": 1e5}, "arms": ["batch", "none+fit"]})
    outcomes = {receipt.outcome for receipt in train_here(pool, data)}
    assert outcomes <= {"diverged", "chance"}
    assert statuses(pool, "none+fit") == {"diverged"}
    assert pool.missing("none+fit") == []
    weak, data = tiny_pool(tmp_path / "q", {"recipe": {"lr": 1e-7}})
    assert {receipt.outcome for receipt in train_here(weak, data)} == {"chance"}
    assert statuses(weak, "batch") == {"chance"}


def test_a_class_that_one_half_lacks_is_no_fault(tmp_path):
    y = np.arange(120) % 5
    y[y == 4] = 0
    y[3] = 4
    pool, data = tiny_pool(tmp_path / "p", {"arms": ["batch"], "data": {"holdout": 0.0}}, y=y)
    train_here(pool, data)
    assert pool.missing("batch") == []
    assert statuses(pool, "batch") <= {"trained", "chance"}
    assert all(np.isfinite(pool.phi("batch", np.arange(4))).all(axis=(1, 2)))


def test_five_records_train(tmp_path):
    x = np.arange(5 * 64, dtype=np.uint8).reshape(5, 8, 8)
    pool, data = tiny_pool(tmp_path / "p", x=x, y=np.array([0, 1, 0, 1, 0]))
    train_here(pool, data)
    assert [pool.missing(arm) for arm in pool.spec.arms] == [[], []]


def test_a_failing_unit_is_a_receipt_that_names_the_place_and_leaves_nothing_behind(tmp_path):
    code = tmp_path / "net.py"
    code.write_text(
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self, classes):\n"
        "        super().__init__()\n"
        "        self.linear = nn.Linear(64, classes)\n"
        "    def forward(self, x):\n"
        "        if self.training and len(x) > 8:\n"
        "            raise MemoryError\n"
        "        return self.linear(x.flatten(1))\n"
    )
    pool, data = tiny_pool(tmp_path / "p", {"arch": f"{code}:Net"})
    receipt = train_units([Unit(pool.path, "batch", 0)], TrainingData.of(data))[0]
    assert receipt.outcome == "failed"
    assert receipt.message == "MemoryError (net.py, line 8)"
    assert not receipt.unit.entry.exists()
    assert [path.name for path in receipt.unit.entry.parent.iterdir()] == [".0000.lock"]


def test_history_holds_the_evaluated_epochs_by_subset_and_membership(pool):
    frame = pool.history("batch", 0)
    assert frame[frame["metric"] == "training_loss"]["epoch"].tolist() == [1, 2, 3, 4, 5, 6]
    last = frame[(frame["metric"] == "accuracy") & (frame["epoch"] == 6)]
    assert set(last["subset"]) == {"all", "clean", "mislabeled", "ood", "population"}
    info = pool.info("batch", 0)
    both = last[last["subset"] == "all"].set_index("member")["value"]
    assert both[True] == pytest.approx(info.member_accuracy)
    assert both[False] == pytest.approx(info.nonmember_accuracy)
    assert last[last["subset"] == "population"]["value"].item() == pytest.approx(info.population_accuracy)
    ratios = frame[frame["metric"] == "ratio_mean"]
    assert len(ratios) >= 2
    assert (ratios["value"] > 0).all()
    assert pool.history("none", 0).query("metric == 'ratio_mean'").empty


class Viewing(nn.Module):
    """Flattens a feature map of several channels by ``view``, which takes only maps in the usual order."""

    def __init__(self, flatten, maps):
        super().__init__()
        self.conv, self.linear = nn.Conv2d(1, maps, 3, padding=1), nn.Linear(64 * maps, 10)
        self.flatten = flatten

    def forward(self, x):
        return self.linear(self.flatten(self.conv(x)))


@pytest.mark.parametrize(
    ("flatten", "maps", "channels_last"),
    [(lambda x: x.view(len(x), -1), 32, False), (lambda x: x.flatten(1), 32, True), (lambda x: x.flatten(1), 6, False)],
    ids=["view", "wide", "narrow"],
)
def test_images_train_in_channels_last_order_where_the_model_can_and_gains(flatten, maps, channels_last):
    x, label = digits_like(40)
    torch.manual_seed(0)
    model = Viewing(flatten, maps)
    outcome = train(model, x, label, epochs=4)
    assert outcome.loss < 2
    assert model.conv(torch.zeros(2, 1, 8, 8)).is_contiguous() is not channels_last
