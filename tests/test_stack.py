"""Small models that train side by side: each comes out as it does alone, whoever its neighbours are."""

import copy
import random
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import tiny_pool
from torch import nn

from shadow_pool.arms import parse_arm
from shadow_pool.models.norms import Shift
from shadow_pool.models.resolve import build_model
from shadow_pool.models.stack import STACK, Stack, is_small
from shadow_pool.spec import Recipe
from shadow_pool.store.entry import clear_leftover
from shadow_pool.train import loop
from shadow_pool.train import shadows as by_pool
from shadow_pool.train.job import TrainingData, TrainingJob
from shadow_pool.train.loop import Training, common_steps, may_stack, train_model, train_side_by_side
from shadow_pool.train.shadows import Shadow, block_size, one_thread, train_shadows
from shadow_pool.train.unit import Unit, train_units


def scaled(batch):
    return batch.float() / 255


def training(index, *, count=41, arch="lenet", arm="batch", model=None, fit_loss=None, on_epoch=None, **recipe):
    rng = np.random.default_rng(index)
    x = rng.integers(0, 256, (count, 1, 8, 8), dtype=np.uint8)
    norm = parse_arm(arm).norm
    model = model or build_model(arch, norm, classes=10, input_shape=(1, 8, 8), seed=index)
    recipe = Recipe(**{"epochs": 2, "batch_size": 16, "lr": 0.02, **recipe})
    job = TrainingJob(arm=parse_arm(arm), recipe=recipe, seed=5, index=index, fit_loss=fit_loss)
    return Training(model, x, rng.integers(0, 10, count), job, on_epoch)


def together(trainings, halves=(41, 41)):
    with one_thread():
        steps = common_steps(halves, trainings[0].job.recipe.batch_size)
        return train_side_by_side(trainings, steps, preprocess=scaled)


def alone(trainings):
    with one_thread():
        return [train_model(own, preprocess=scaled) for own in trainings]


def bits(model):
    return {name: value.numpy().tobytes() for name, value in model.state_dict().items()}


def assert_close(model, other):
    for (name, value), expected in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert value.is_contiguous(), name
        torch.testing.assert_close(value, expected, rtol=1e-3, atol=1e-4, msg=name)


ARMS = ("batch", "none", "group", "layer", "affine", "batch+penalty(0.5)")


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize(("arch", "counts"), [("lenet", (48, 47, 47, 48)), ("mlp(width=24)", (41, 41, 41, 41))])
def test_models_side_by_side_are_those_that_train_alone(arm, arch, counts):
    def four(**options):
        return [training(i, count=n, arch=arch, arm=arm, **options) for i, n in enumerate(counts)]

    stacked, single = four(), four()
    found, expected = together(stacked, (min(counts), max(counts))), alone(single)
    for own, other, outcome, reference in zip(stacked, single, found, expected, strict=True):
        assert_close(own.model, other.model)
        assert outcome == replace(reference, loss=pytest.approx(reference.loss, rel=1e-4))


@pytest.mark.parametrize("options", [{"optimizer": "adamw"}, {"label_smoothing": 0.1}, {"augmentation": "flip-shift"}])
def test_whatever_the_recipe(options):
    stacked, single = ([training(i, lr=0.001, **options) for i in range(STACK)] for _ in range(2))
    assert [o.loss for o in together(stacked)] == pytest.approx([o.loss for o in alone(single)], rel=1e-4)


def test_a_binary_model_of_one_logit_is_stacked(monkeypatch):
    def one(index):
        own = training(index, model=nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.ReLU(), nn.Linear(5, 1)))
        with torch.no_grad():
            for p in own.model.parameters():
                p.copy_(torch.linspace(-0.1, 0.1, p.numel()).view_as(p))
        return replace(own, label=own.label % 2)

    stacked, single = [one(i) for i in range(STACK)], [one(i) for i in range(STACK)]
    expected = alone(single)
    monkeypatch.delattr(loop, "train_model")
    assert [o.loss for o in together(stacked)] == pytest.approx([o.loss for o in expected], rel=1e-4)


@pytest.fixture(scope="module", params=["batch", "none", "batch-odd"])
def four(request):
    halves = (40, 41) if request.param.endswith("odd") else (41, 41)
    counts = [halves[index % 2] for index in range(STACK)]
    arm = request.param.split("-")[0]

    def make(indices):
        return [training(index, count=counts[index % STACK], arm=arm, batch_size=12) for index in indices]

    everyone = make(range(STACK))
    together(everyone, halves)
    return make, halves, [bits(own.model) for own in everyone]


@settings(max_examples=8, deadline=None)
@given(st.sets(st.integers(0, STACK - 1), min_size=1, max_size=STACK - 1))
def test_a_model_has_the_same_bits_whichever_of_its_block_train_with_it(four, indices):
    make, halves, expected = four
    some = make(sorted(indices))
    together(some, halves)
    assert [bits(own.model) for own in some] == [expected[index] for index in sorted(indices)]


def test_a_model_that_diverges_or_stops_early_leaves_the_others_as_they_were():
    calm = [training(i, epochs=3, arm="none+fit") for i in range(STACK)]
    outcomes = together(calm)
    assert [outcome.epochs for outcome in outcomes] == [3] * STACK
    rough, seen = [training(i, epochs=3, arm="none+fit") for i in range(STACK)], []
    rough[1] = replace(rough[1], on_epoch=lambda epoch, model, loss: model.head.bias.data.fill_(float("nan")))
    rough[2] = training(
        2,
        epochs=3,
        arm="none+fit",
        fit_loss=100.0,
        on_epoch=lambda epoch, model, loss: seen.append((epoch, bits(model))),
    )
    found = together(rough)
    assert [outcome.epochs for outcome in found] == [3, 2, 1, 3]
    assert [outcome.diverged for outcome in found] == [False, True, False, False]
    assert [outcome.reached for outcome in found] == [False, False, True, False]
    assert seen == [(1, bits(rough[2].model))]
    for index in (0, 3):
        assert bits(rough[index].model) == bits(calm[index].model)


def test_a_model_that_starts_with_what_is_no_number_leaves_the_others_as_they_were():
    calm, rough = [[training(i) for i in range(STACK)] for _ in range(2)]
    rough[2].model.conv1.weight.data[0] = float("nan")
    together(calm)
    assert [outcome.diverged for outcome in together(rough)] == [False, False, True, False]
    for index in (0, 1, 3):
        assert bits(rough[index].model) == bits(calm[index].model)


def test_models_can_be_asked_while_they_train_and_own_their_tensors_afterwards():
    seen = []

    def ask(epoch, model, loss):
        model.eval()
        with torch.no_grad():
            seen.append((epoch, model(torch.ones(3, 1, 8, 8)).sum().item(), loss))

    four = [training(i, on_epoch=ask) for i in range(STACK)]
    outcomes = together(four)
    assert [epoch for epoch, _, _ in seen] == [1] * STACK + [2] * STACK
    assert [loss for _, _, loss in seen[STACK:]] == [outcome.loss for outcome in outcomes]
    final = [own.model.eval()(torch.ones(3, 1, 8, 8)).sum().item() for own in four]
    assert final == pytest.approx([answer for _, answer, _ in seen[STACK:]], rel=1e-5)
    for own in four:
        assert own.model.norm1.num_batches_tracked == own.model.norm4.num_batches_tracked == 2 * 3
        sizes = [value.untyped_storage().nbytes() for value in own.model.state_dict().values()]
        assert sizes == [value.nbytes for value in own.model.state_dict().values()]


# ------------------------------------------------------------------ what cannot be stacked


class Cat(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.head = nn.Conv2d(1, 2, 3), nn.Conv2d(1, 2, 3), nn.Linear(144, 10)

    def forward(self, x):
        return self.head(torch.cat([self.one(x), self.two(x)], 1).flatten(1))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)
        self.two.weight = self.one.weight

    def forward(self, x):
        return self.head(self.two(self.one(x.flatten(1)).relu()).relu())


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.head = nn.Parameter(torch.ones(64)), nn.Linear(64, 10)

    def forward(self, x):
        return self.head(self.scale * x.flatten(1))


class Viewed(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 3, 3), nn.Linear(108, 10)

    def forward(self, x):
        return self.head(self.conv(x).reshape(-1, 108))


class Mixed(nn.Module):
    """Looks at its features as a whole, in a branch that starts from zero."""

    def __init__(self):
        super().__init__()
        self.linear, self.gate, self.head = nn.Linear(64, 8), nn.Linear(8, 8), nn.Linear(8, 10)
        nn.init.zeros_(self.gate.weight)

    def forward(self, x):
        x = self.linear(x.flatten(1))
        return self.head(x + self.gate(x.softmax(1)))


class Flips(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        return self.head((x.flip(-1) if torch.rand(()).item() < 0.02 else x).flatten(1))


class Clips(nn.Module):
    """Looks at all values of a batch, but only once one is large."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        x = x.flatten(1)
        return self.head(x / x.abs().max() if x.abs().max() > 1000 else x)


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.steps = nn.Linear(64, 10), 0

    def forward(self, x):
        self.steps += 1
        return self.head(x.flatten(1)) * min(1.0, (20 + self.steps) / 21)


def hooked():
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    model[1].register_forward_hook(lambda module, given, output: 2 * output)
    return model


def flat(*layers):
    return lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 8), *copy.deepcopy(layers), nn.Linear(8, 10))


OTHERS = {
    "concatenated channels": Cat,
    "tied weights": Tied,
    "a parameter of its own": Own,
    "features that are not one record's": Viewed,
    "a softmax over features": Mixed,
    "hooks": hooked,
    "a rare draw": Flips,
    "a branch on values": Clips,
    "a count of its own": Counts,
    "dropout": flat(nn.Dropout(0.5)),
    "layer norm": flat(nn.LayerNorm(8)),
    "batchnorm over all steps": flat(nn.BatchNorm1d(8, momentum=None)),
    "weight norm": lambda: nn.Sequential(nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(64, 10))),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_what_cannot_be_stacked_trains_alone_to_the_bit(kind):
    def four():
        torch.manual_seed(0)
        return [training(index, model=OTHERS[kind]()) for index in range(STACK)]

    assert Stack.of([own.model for own in four()], (1, 8, 8)) is None
    some, single = four(), four()
    assert together(some) == alone(single)
    assert [bits(own.model) for own in some] == [bits(own.model) for own in single]


def test_what_other_threads_draw_meanwhile_does_not_keep_a_stack_apart():
    stop = threading.Event()

    def draw():
        while not stop.wait(0.001):
            random.random()

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        models = [build_model("lenet", "batch", classes=10, input_shape=(1, 8, 8), seed=seed) for seed in range(STACK)]
        assert Stack.of(models, (1, 8, 8)) is not None
    finally:
        stop.set()
        thread.join()


def test_layers_that_are_groups_of_a_larger_one_are_stacked():
    layers = [nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4, affine=False), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2)]
    layers += [Shift(4, scale=torch.rand(4)), nn.GroupNorm(2, 4), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
    layers += [nn.Linear(16, 6), nn.BatchNorm1d(6, track_running_stats=False), nn.Linear(6, 10, bias=False)]
    for p in layers[3].parameters():
        p.requires_grad_(False)

    def four():
        return [training(index, model=copy.deepcopy(nn.Sequential(*layers))) for index in range(STACK)]

    some, single = four(), four()
    assert Stack.of([own.model for own in four()], (1, 8, 8)) is not None
    together(some)
    alone(single)
    for own, other in zip(some, single, strict=True):
        assert_close(own.model, other.model)
        assert torch.equal(own.model[3].weight, layers[3].weight)


@pytest.mark.parametrize("halves", [(16, 15), (32, 33), (33, 35)])
def test_halves_that_differ_in_their_batches(halves):
    """16 and 15 differ in their only batch, 33 joins its last record to the second of two, 35 has a third."""
    some, single = ([training(i, count=halves[i % 2], arm="none") for i in range(STACK)] for _ in range(2))
    together(some, halves)
    alone(single)
    for own, other in zip(some, single, strict=True):
        assert_close(own.model, other.model)


def test_only_small_models_on_a_processor_and_without_clipping_may_stack():
    def built(arch):
        return build_model(arch, "batch", classes=10, input_shape=(3, 32, 32), seed=0)

    small, arm = built("lenet"), parse_arm("batch")
    assert may_stack(small, arm, Recipe(), "cpu")
    assert not may_stack(small, arm, Recipe(), "cuda")
    assert not may_stack(small, arm, Recipe(gradient_clip=1.0), "cpu")
    assert not may_stack(small, parse_arm("none+dp(8)"), Recipe(), "cpu")
    assert not is_small(built("resnet8"))
    assert not is_small(built("mlp"))


# ------------------------------------------------------------------ in a pool


@pytest.mark.parametrize("batch_size", [16, 8])
def test_pairs_of_unequal_groups_train_side_by_side_where_their_steps_allow(tmp_path, monkeypatch, batch_size):
    group = np.repeat(np.arange(12), [31, 17, 13, 11, 9, 8, 7, 6, 5, 4, 5, 4]).astype(str)
    pool, data = tiny_pool(tmp_path / "pool", {"n": 8, "recipe": {"batch_size": batch_size}}, group=group)
    counts = pool.membership.sum(axis=1)
    assert len(set(counts[:4])) > 2  # pairs of this block are not alike
    steps = [common_steps(tuple(counts[first : first + 2]), batch_size) for first in (0, 2)]

    def shadows(indices):
        x, label = data.records.x, data.records.label
        return [Shadow(i, x[pool.membership[i]], label[pool.membership[i]]) for i in indices]

    whole = [model for model, _ in train_shadows(pool, "batch", shadows(range(4)))]
    for index in range(4):
        ((one, _),) = train_shadows(pool, "batch", shadows([index]))
        assert bits(one) == bits(whole[index])
    calls, train = [], by_pool.train_side_by_side
    monkeypatch.setattr(
        by_pool, "train_side_by_side", lambda some, *rest, **o: calls.append(some) or train(some, *rest, **o)
    )
    train_shadows(pool, "batch", shadows(range(4)))
    assert len(calls) == len(set(steps))


def test_steps_that_a_pair_has_in_common():
    assert common_steps((130, 130), 64) == (64, 64, 2)
    assert common_steps((130, 131), 64) == (64, 64, None)
    assert common_steps((764, 763), 64) == common_steps((762, 765), 64) == (64,) * 11 + (None,)
    assert common_steps((128, 127), 64) == (64, None)
    assert common_steps((130, 128), 64) == ()


def test_a_model_that_fails_in_its_block_costs_no_other(tmp_path):
    pool, data = tiny_pool(tmp_path / "pool", {"arms": ["batch", "none+fit"]})
    lean = TrainingData.of(data)
    assert block_size(pool, "batch", "cpu") == STACK
    train_units([Unit(pool.path, "batch", index) for index in (0, 1, 3)], lean)
    receipts = train_units([Unit(pool.path, "none+fit", index, wait=True) for index in range(4)], lean)
    assert [receipt.outcome == "failed" for receipt in receipts] == [False, False, True, False]
    assert "needs model 2 of the batch arm" in receipts[2].message
    assert not any(clear_leftover(pool.entry("none+fit", index)) for index in range(4))
    assert [receipt.unit.index for receipt in receipts] == [0, 1, 2, 3]
    again = train_units([Unit(pool.path, "batch", index) for index in range(4)], lean)
    assert [receipt.outcome == "present" for receipt in again] == [True, True, False, True]


def test_a_pool_that_grows_has_the_bits_of_one_made_at_once(tmp_path):
    grown, data = tiny_pool(tmp_path / "grown", {"n": 6, "arms": ["batch"]})
    source = {"data": {"source": grown.spec.data.source}}
    lean = TrainingData.of(data)
    train_units([Unit(grown.path, "batch", index) for index in range(4)], lean)
    train_units([Unit(grown.path, "batch", index) for index in (4, 5)], lean)
    grown, _ = tiny_pool(tmp_path / "grown", {"n": 8, "arms": ["batch"], **source})
    train_units([Unit(grown.path, "batch", index) for index in (6, 7)], lean)
    once, data = tiny_pool(tmp_path / "once", {"n": 8, "arms": ["batch"], **source})
    for first in (0, 4):
        train_units([Unit(once.path, "batch", index) for index in range(first, first + 4)], TrainingData.of(data))
    for index in range(8):
        for name in ("phi.parquet", "weights.safetensors"):
            assert (grown.entry("batch", index) / name).read_bytes() == (once.entry("batch", index) / name).read_bytes()
