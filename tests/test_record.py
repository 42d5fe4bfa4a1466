"""A record of torch's operations says what the model says, step by step."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_tx as tx
from keras_tx.generation import record

if keras.backend.backend() != "torch":
    pytest.skip("only torch needs records", allow_module_level=True)

import torch

VOCAB = 23
PROMPTS = [[5, 7, 11, 2, 9], [3, 4]]


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Records are made at the second step, and counted."""
    made = []

    def counted(function, args, make=record.record):
        made.append(make(function, args))
        assert made[-1] is not function or counted.may_fail
        return made[-1]

    counted.may_fail = False
    monkeypatch.setattr(record, "PATIENCE", 1)
    monkeypatch.setattr(record, "record", counted)
    counted.made = made
    return counted


def model_of(**options):
    keras.utils.set_random_seed(3)
    options = {"num_kv_heads": 2, "pad_id": 0, "position": "rotary", **options}
    return tx.decoder(VOCAB, 16, 2, 4, init_stddev=0.5, **options)


def check(model, *args, **options):
    found = tx.generate(model, *args, **options)
    assert found == tx.generate(model, *args, compile=False, **options)
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 5},
        {"position": "relative"},
        {"position": "alibi"},
        {"position": "learned", "max_length": 200},
        {"num_kv_heads": 1, "logit_cap": 3.0, "tie_embeddings": False},
    ],
)
def test_any_model_writes_the_same_with_its_record(options, at_once):
    model = model_of(**options)
    check(model, PROMPTS, 12)
    check(model, [3, 4, 5], 9)
    assert len(at_once.made) == 2  # of two rows, and of one


def test_it_goes_on_behind_half_of_the_capacity(at_once):
    found = check(model_of(window=70), [1, 2, 3], 150)
    assert len(found) == 153
    assert len(at_once.made) == 2


def test_samplers_and_seeds_are_no_part_of_it(at_once):
    model = model_of()
    chain = [tx.RepetitionPenalty(1.3), tx.NoRepeatNGrams(2), tx.TopP(0.9), 0.8]
    texts = [check(model, PROMPTS, 9, sampler=chain, seed=seed) for seed in (1, 2)]
    assert texts[0] != texts[1]
    check(model, PROMPTS, 9, sampler=tx.Beam(3), stop_tokens=[4])
    assert len(at_once.made) == 2


def test_translations_and_their_beams(at_once):
    keras.utils.set_random_seed(4)
    model = tx.encoder_decoder(VOCAB, 16, 1, 4, init_stddev=0.5, pad_id=0)
    sources = [[5, 6, 7, 8, 9, 1, 2], [3, 4]]
    check(model, [1], 9, source=sources)
    check(model, [1], 9, source=sources[::-1], sampler=tx.Beam(2))
    assert len(at_once.made) == 2


def test_small_caches_and_streams(at_once):
    model = model_of()
    for dtype in ("int8", "bfloat16"):
        check(model, PROMPTS, 9, cache_dtype=dtype)
    streamed = [int(token) for token in tx.stream(model, [3, 4], 9)]
    assert [3, 4, *streamed] == tx.generate(model, [3, 4], 9)


def test_weights_are_followed_whether_they_change_or_are_replaced(at_once):
    model = model_of()
    texts = [check(model, PROMPTS, 12)]
    model.set_weights([w * 0.7 + 0.02 for w in model.get_weights()])
    texts.append(check(model, PROMPTS, 12))
    assert len(at_once.made) == 1
    table = model.weights[0]
    table._value = torch.nn.Parameter(table.value.detach().flip(0))
    texts.append(check(model, PROMPTS, 12))
    assert len(at_once.made) == 2
    assert texts[0] != texts[1] != texts[2]


def test_what_reads_values_is_not_recorded(at_once):
    at_once.may_fail = True

    def alternate(history):
        step = int(ops.convert_to_numpy(history.step))
        return np.arange(VOCAB) % 2 == step % 2

    found = tx.generate(model_of(), [3], 6, sampler=tx.Constrain(alternate))
    assert [token % 2 for token in found[1:]] == [0, 1, 0, 1, 0, 1]


def test_tidying_leaves_the_result_and_takes_work_away():
    from torch.fx.experimental.proxy_tensor import make_fx

    weight = torch.nn.Parameter(torch.randn(2, 3, 4))

    def function(x, kept):
        rows = x.reshape(-1, 6).unsqueeze(0).permute(1, 0, 2).reshape(-1, 6)
        steps = torch.arange(5) * 2 + torch.tensor(1)
        before = kept + 0.0
        kept[1] = rows[0, 0]
        flat = weight.permute(0, 1, 2).reshape(6, 4)
        again = weight.reshape(6, 4)
        return rows @ flat + rows @ again, steps, before, kept + 0.0, torch.rand(2)

    with torch.no_grad():
        x, kept = torch.randn(2, 3, 4), torch.zeros(3)
        module = make_fx(function)(x, kept.clone())
        count = len(module.graph.nodes)
        record.tidy(module)
        assert len(module.graph.nodes) < 0.6 * count
        for _ in range(2):
            expected = function(x, kept.clone())
            found = module(x, kept.clone())
            for one, other in zip(found[:4], expected[:4], strict=True):
                assert torch.equal(one, other)
            assert not torch.equal(found[2], found[3])
            weight *= 2.0
        assert not torch.equal(module(x, kept.clone())[4], found[4])
