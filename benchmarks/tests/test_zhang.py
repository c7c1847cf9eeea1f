"""The benchmark's own training loop: gradients, clipping, noise, selectors and probabilities by independent means."""

import json
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
import torch
from benchmarks.wides import zhang, zhang_task
from benchmarks.wides.zhang_select import Exponential, Setting, SparseVector, Uniform, _laplace
from benchmarks.wides.zhang_task import Adam, Loss, Way, batches, log_prob, read_samples, row_gradients, train
from scipy.special import logsumexp
from scipy.stats import chi2

from anyorder.noise import NoiseSource

TINY = replace(Setting.tiny(), vocabulary=40, train=600, validation=50, test=300, canaries=5)
SOURCE = NoiseSource(bytes(32))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A hundred stop words, the most frequent, and forty others."""
    rng = np.random.default_rng(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = [f"{letters[i // 26]}{letters[i % 26]}" for i in range(140)]
    lines = [" ".join(words[:100]) for _ in range(200)]
    lines += [" ".join(words[100 + i] for i in rng.integers(40, size=8)) for _ in range(90)]
    place = tmp_path_factory.mktemp("text") / "text.txt"
    place.write_text("\n".join(lines), encoding="utf-8")
    return place


@pytest.fixture(scope="module")
def samples(folder):
    return read_samples(folder, TINY, seed=0)


def test_samples_are_of_ten_different_words(samples, folder):
    for part, size in ((samples.train, TINY.train), (samples.test, TINY.test)):
        assert part.shape == (size, 10)
        assert part.min() >= 0
        assert part.max() < TINY.vocabulary
        ordered = np.sort(part, 1)
        assert (ordered[:, 1:] != ordered[:, :-1]).all()
    planted = read_samples(folder, TINY, seed=0, repeats=9)
    assert len(planted.train) == TINY.train
    pairs = {tuple(row) for row in planted.train[-6 * 5 * 9 :, :2].tolist()}
    for a, b, c in planted.secrets.phrases.tolist():
        assert {(x, y) for x, y in ((a, b), (b, c), (c, a)) if x != y} <= pairs


def test_gradients_norms_and_losses_are_autograd_s(samples):
    table = np.random.default_rng(0).standard_normal((TINY.vocabulary, 6)).astype(np.float32)
    rows, norms, losses = row_gradients(table, samples.train[:20])
    for ids, row, norm, loss in zip(samples.train, rows, norms, losses, strict=False):
        weight = torch.tensor(table, requires_grad=True)
        scores = weight[ids[1:]] @ weight[ids[0]]
        mine = -torch.nn.functional.logsigmoid(torch.cat([scores[:1], -scores[1:]])).sum()
        mine.backward()
        dense = torch.zeros_like(weight)
        dense[ids] = torch.from_numpy(row)
        torch.testing.assert_close(dense, weight.grad, atol=1e-5, rtol=1e-4)
        assert norm == pytest.approx(weight.grad.norm().item(), rel=1e-5)
        assert loss == pytest.approx(mine.item(), rel=1e-5)
    assert Loss(samples.train[:20], TINY.vocabulary)(table) == pytest.approx(losses.mean(), rel=1e-5)


def _given_to_adam(monkeypatch, samples, way, steps, setting=TINY):
    found = []
    monkeypatch.setattr(Adam, "dense", lambda self, gradient: found.append(gradient.copy()))
    train(samples, setting, way, 0, steps=steps, points=1)
    return np.stack(found)


def test_noise_of_dp_sgd(monkeypatch, samples):
    """On rows that no sample is on: sigma S1 / b."""
    only = replace(samples, train=samples.train[:1])
    found = _given_to_adam(monkeypatch, only, Way("all", 0.32), 30, replace(TINY, batch=1))
    quiet = np.delete(found, samples.train[0], axis=1)
    assert quiet.std() == pytest.approx(0.32 * 15, rel=0.03)
    assert abs(quiet.mean()) < 4 * 0.32 * 15 / np.sqrt(quiet.size)


def test_a_sample_moves_the_sum_by_the_clip_norm(monkeypatch, samples):
    only = replace(samples, train=samples.train[:1])
    setting = replace(TINY, batch=1, clip=2.0)
    found = _given_to_adam(monkeypatch, only, Way("all", 0.0), 4, setting)
    assert np.linalg.norm(found[0]) == pytest.approx(2.0, rel=1e-5)
    found = _given_to_adam(monkeypatch, only, Way("none"), 1, setting)
    assert np.linalg.norm(found[0]) > 2.1


@pytest.mark.parametrize("selector", ["em", "uniform"])
def test_noise_of_a_selection(monkeypatch, samples, selector):
    """Sigma times min(S1 / b, S2) on k coordinates, and nothing elsewhere; S2 holds before the noise."""
    for changed, bound in (({}, 0.75), ({"clip": 1e-3, "second_clip": 1e-8}, 1e-8)):
        setting = replace(TINY, **changed)
        found = _given_to_adam(monkeypatch, samples, Way(selector, 0.5), 200, setting)
        assert (np.count_nonzero(found, axis=(1, 2)) == TINY.chosen).all()
        noise = found - _given_to_adam(monkeypatch, samples, Way(selector, 0.0), 200, setting)  # no table moves here
        assert noise[found != 0].std() == pytest.approx(0.5 * bound, rel=0.08)
    found = _given_to_adam(monkeypatch, samples, Way(selector, 0.0), 50, replace(TINY, second_clip=1e-3))
    assert np.linalg.norm(found, axis=(1, 2)).max() == pytest.approx(1e-3, rel=1e-5)


def _chi_squared(selector, gradient, law, draws):
    counts = dict.fromkeys(law, 0)
    for step in range(draws):
        counts[frozenset(selector(gradient, step).tolist())] += 1
    statistic = sum((counts[s] - draws * p) ** 2 / (draws * p) for s, p in law.items())
    return chi2.sf(statistic, len(law) - 1)


def test_the_exponential_mechanism_is_its_draws_one_by_one():
    setting = Setting(chosen=2, exponent=3.0)
    gradient = np.array([0.1, 0, -0.05, 0.2, 0.02], np.float32)
    weight = np.exp(1.5 * np.minimum(np.abs(gradient) / 0.1, 1).astype(np.float64))
    law = {}
    for a, b in permutations(range(5), 2):
        p = weight[a] / weight.sum() * weight[b] / (weight.sum() - weight[a])
        law[frozenset((a, b))] = law.get(frozenset((a, b)), 0) + p
    assert _chi_squared(Exponential(setting, SOURCE), gradient, law, 20_000) > 1e-3
    assert _chi_squared(Uniform(setting, SOURCE), gradient, law, 20_000) < 1e-6
    assert _chi_squared(Uniform(setting, SOURCE), gradient, dict.fromkeys(law, 0.1), 20_000) > 1e-3


def test_sparse_vector_is_its_scan_one_by_one():
    setting = Setting(chosen=5)
    gradient = np.random.default_rng(0).standard_normal(9000).astype(np.float32)
    for step in range(40):
        alpha = (2.0, 0.2)[step % 2]  # the second is reached without any noise too
        selector = SparseVector(setting, SOURCE, alpha=alpha)
        noise = _laplace(SOURCE.words(step, 0, 5 + 9000))
        found = []
        for i, u in enumerate(np.minimum(np.abs(gradient), 0.1)):
            if u + 2 * selector._scale * noise[5 + i] >= alpha + selector._scale * noise[len(found)]:
                found.append(i)
                if len(found) == 5:
                    break
        assert selector(gradient, step).tolist() == found
    assert SparseVector(Setting(), SOURCE)._scale == pytest.approx(1.516, abs=1e-3)
    sample = _laplace(SOURCE.words(0, 0, 100_000))
    assert np.abs(sample).mean() == pytest.approx(1, abs=0.02)
    assert np.median(sample) == pytest.approx(0, abs=0.02)


def test_lazy_and_dense_adam_are_torch_s():
    rng = np.random.default_rng(0)
    first = rng.standard_normal((8, 1)).astype(np.float32)
    for name, torch_s in (("lazy", torch.optim.SparseAdam), ("dense", torch.optim.Adam)):
        mine, weight = first.copy(), torch.nn.Parameter(torch.tensor(first))
        adam, optimizer = Adam(mine, 0.1), torch_s([weight], lr=0.1)
        for _ in range(6):
            places = np.sort(rng.choice(8, 3, replace=False))
            values = rng.standard_normal(3).astype(np.float32)
            gradient = np.zeros((8, 1), np.float32)
            gradient[places, 0] = values
            if name == "lazy":
                adam.lazy(places, values)
                weight.grad = torch.sparse_coo_tensor(places[None], values[:, None], (8, 1), check_invariants=False)
            else:
                adam.dense(gradient)
                weight.grad = torch.tensor(gradient)
            optimizer.step()
        np.testing.assert_allclose(mine, weight.detach().numpy(), rtol=1e-5, atol=1e-6)


def test_batches(samples):
    sizes = [len(ids) for ids in batches(samples.train, TINY, True, 0, 2000)]
    assert np.mean(sizes) == pytest.approx(20, abs=4 * np.sqrt(20 / 2000))
    assert np.var(sizes) == pytest.approx(20 * (1 - 20 / 600), rel=0.15)
    epoch = np.concatenate(list(batches(samples.train, TINY, False, 0, 30)))
    assert sorted(map(tuple, epoch)) == sorted(map(tuple, samples.train))


def test_probabilities_sum_to_one():
    table = np.random.default_rng(0).standard_normal((7, 4)).astype(np.float32)
    found = log_prob(table)
    for context in ([[3]], [[2, 5]], [[5, 2]], [[4, 4]]):
        contexts, words = np.repeat(context, 7, 0), np.arange(7)
        logits = table.astype(float) @ table[context[0]].astype(float).mean(0)
        np.testing.assert_allclose(found(contexts, words), logits - np.log(np.exp(logits).sum()), rtol=1e-6)
    large = 30 * table.astype(float)
    logits = large @ large[[0, 1]].mean(0)
    there = log_prob(30 * table)(np.repeat([[0, 1]], 7, 0), np.arange(7))
    np.testing.assert_allclose(there, logits - logsumexp(logits), rtol=1e-5, atol=1e-3)


def test_runs_are_kept(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(zhang, "RESULTS", tmp_path / "zhang.jsonl")
    runs = zhang.Runs(folder, TINY)
    job = (Way("em", 0.5), 0, 3)
    line = runs.line(job)
    assert line["canaries"]["canaries"] == 5
    assert len(line["curve"][0]) == 4
    monkeypatch.setattr(zhang_task, "train", None)
    monkeypatch.setattr(zhang, "train", None)
    assert zhang.Runs(folder, TINY).line(job) == json.loads(json.dumps(line))
    assert next(iter(zhang.shown(job, line))).peer == line["chance"]["distance"]
    assert len(set(zhang.jobs(3))) == 3 * (2 * 9 + 9)
