import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import nn

from shadow_pool.queries import PLAIN, View
from shadow_pool.signals import compute_signals, phi_from_logits


def plain(batch):
    return batch.float()


def ask(model, x, label, **options):
    return compute_signals(model, x, label, **{"preprocess": plain, "views": (PLAIN,), **options})


class Spy(nn.Module):
    """Linear on pixels; notes the size and the mode of each batch."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(1)
        self.linear = nn.Linear(4, 3)
        self.seen = []

    def forward(self, x):
        self.seen.append((len(x), self.training, self.norm.training, torch.is_grad_enabled()))
        return self.linear(self.norm(x).flatten(1))


def test_goldens_of_phi():
    assert phi_from_logits(np.array([[1.0, 2, -3]]), np.array([1])) == pytest.approx([0.98185007], abs=1e-8)
    assert phi_from_logits(np.array([[-1.0, 1, 0]]), np.array([2])) == pytest.approx([-1.12692801], abs=1e-8)


@given(
    hnp.arrays(np.float64, st.tuples(st.integers(1, 5), st.integers(2, 6)), elements=st.floats(-30, 30)),
    st.integers(0, 10**6),
)
def test_phi_is_the_logit_of_the_softmax_probability(z, pick):
    y = (pick // (1 + np.arange(len(z)))) % z.shape[1]
    p = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
    rows = np.arange(len(z))
    rest = np.where(np.arange(z.shape[1]) == y[:, None], 0, p).sum(axis=1)
    assert phi_from_logits(z, y) == pytest.approx(np.log(p[rows, y]) - np.log(rest), rel=1e-9, abs=1e-9)
    assert phi_from_logits(z + 1e6, y) == pytest.approx(phi_from_logits(z, y), abs=1e-8)


def test_phi_survives_logits_that_saturate_a_float32_probability():
    phi = phi_from_logits(torch.tensor([[0.0, 200.0], [0.0, -1e4]]), torch.tensor([1, 1]))
    assert phi.dtype == np.float64
    assert phi.tolist() == [200.0, -1e4]


def test_a_single_logit_means_two_columns():
    z = np.array([[2.5], [-1.0]])
    both = np.concatenate([np.zeros((2, 1)), z], axis=1)
    assert np.array_equal(phi_from_logits(z, np.array([1, 0])), phi_from_logits(both, np.array([1, 0])))


@pytest.mark.parametrize(
    ("logits", "labels", "says"),
    [
        (np.zeros(3), np.array([0]), "must be .N, C., got shape .3,."),
        (np.zeros((2, 0)), np.array([0, 0]), "must be .N, C."),
        (np.zeros((2, 3)), np.array([0]), "integers .2., got int64 .1,."),
        (np.zeros((2, 3)), np.array([0.0, 1.0]), "integers .2., got float64"),
        (np.zeros((2, 3)), np.array([0, 3]), "0 .. 2, got 0 .. 3"),
        (np.zeros((2, 3)), np.array([-1, 0]), "0 .. 2, got -1 .. 0"),
    ],
)
def test_misshapen_arguments_are_programming_errors(logits, labels, says):
    with pytest.raises(ValueError, match=says):
        phi_from_logits(logits, labels)


def test_columns_are_queries_and_the_plain_record_gives_the_prediction():
    torch.manual_seed(0)
    model, x = Spy(), np.arange(10 * 4, dtype=np.uint8).reshape(10, 1, 2, 2)
    label = np.arange(10) % 3
    found = ask(model, x, label, views=(PLAIN, View(flip=True)))
    logits = model.eval()(torch.from_numpy(x).float()).detach().double().numpy()
    mirrored = model(torch.from_numpy(x).float().flip(-1)).detach().double().numpy()
    assert found.phi[:, 0] == pytest.approx(phi_from_logits(logits, label), abs=1e-6)
    assert found.phi[:, 1] == pytest.approx(phi_from_logits(mirrored, label), abs=1e-6)
    assert np.array_equal(found.predicted, logits.argmax(axis=1))
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    assert found.predicted_probability == pytest.approx(p.max(axis=1), rel=1e-5)
    assert found.energy == pytest.approx(-np.log(np.exp(logits).sum(axis=1)), rel=1e-4)
    assert (found.phi.dtype, found.predicted.dtype, found.energy.dtype) == (np.float64, np.int64, np.float32)


def test_eval_mode_asks_without_gradients_and_restores_modes_and_buffers():
    model = Spy().train()
    model.linear.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ask(model, np.ones((5, 1, 2, 2), np.float32), np.zeros(5, np.int64))
    assert model.seen == [(5, False, False, False)]
    assert model.training
    assert not model.linear.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_batch_mode_lets_batchnorm_alone_use_the_batch_and_keeps_its_buffers():
    model = Spy()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = np.random.default_rng(0).normal(size=(6, 1, 2, 2)).astype(np.float32)
    found = ask(model, x, np.zeros(6, np.int64), query_mode="batch")
    assert model.seen == [(6, False, True, False)]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not np.allclose(found.phi, ask(model, x, np.zeros(6, np.int64)).phi)


def test_a_record_count_just_above_the_batch_leaves_no_batch_of_one():
    model = Spy()
    ask(model, np.zeros((257, 1, 2, 2), np.float32), np.zeros(257, np.int64), query_mode="batch")
    sizes = [size for size, *_ in model.seen]
    assert sum(sizes) == 257
    assert min(sizes) > 100


def test_no_records_give_empty_signals():
    found = ask(Spy(), np.zeros((0, 1, 2, 2), np.float32), np.zeros(0, np.int64), views=(PLAIN, View(1)))
    assert found.phi.shape == (0, 2)
    assert len(found.predicted) == len(found.energy) == 0


def test_an_unknown_query_mode_is_refused():
    with pytest.raises(ValueError, match="query_mode must be one of"):
        ask(Spy(), np.zeros((2, 1, 2, 2), np.float32), np.zeros(2, np.int64), query_mode="train")


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 600))
def test_signals_do_not_depend_on_which_records_are_asked_together(count):
    torch.manual_seed(1)
    model = Spy()
    x = np.random.default_rng(1).normal(size=(600, 1, 2, 2)).astype(np.float32)
    whole, part = ask(model, x, np.zeros(600, np.int64)), ask(model, x[:count], np.zeros(count, np.int64))
    assert part.phi == pytest.approx(whole.phi[:count], abs=1e-5)


def test_inputs_shared_read_only_between_workers_are_taken_without_a_warning(recwarn):
    x, label = np.zeros((3, 1, 4, 4), np.uint8), np.zeros(3, np.int64)
    x.setflags(write=False)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
    compute_signals(model, x, label, preprocess=lambda batch: batch.float(), views=(PLAIN,))
    assert not recwarn.list
