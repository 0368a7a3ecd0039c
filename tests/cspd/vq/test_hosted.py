"""Models of `transformers` under the VQ model runner: their own codes, by every method, in ragged batches."""

from __future__ import annotations

import functools

import pytest
import torch
from conftest import relative_error
from hf import GUIDANCE, PROMPTS, drafter_of, generated, guided_logits, hf_of, model_of, plain_codes
from toys import counts, draw, p_value, request_of, runner_of, sequences, staggered

from cspd import Engine, MARModels, Request, VQModels, noise
from cspd.discrete.batch import batch_of
from cspd.discrete.rules import guide
from cspd.method import find
from cspd.noise import Purpose
from cspd.request import RoundStats, Sequence, Stopwatch

ARCHITECTURES = ["janus", "chameleon", "lumina_mgpt", "emu3"]
SLOW = pytest.mark.slow
METHODS = {  # with trees and windows that rows end in, and that go beyond the image
    "ar": {},
    "sd": {"gamma": 6},
    "eagle": {"gamma": 5, "coupling": "same-image"},
    "eagle2": {"gamma": 6},
    "sjd": {"window": 5},
    "mc-sjd": {"window": 9},
    "sjd-pac": {"window": 12, "pd_k": 3, "pd_d": 3},
    "gsd": {"window": 6},
    "speculative": {"window": 7, "draft": "jacobi"},
}
OTHERS = [name for name in METHODS if name not in ("ar", "sjd-pac")]
SAME = 1e-4  # p-values


class Case:
    """An architecture's tiny model, and an engine over it with a smaller draft model and EAGLE's drafter."""

    def __init__(self, architecture: str) -> None:
        self.model = model_of(architecture)
        self.target, self.texts, self.image = hf_of(self.model)
        draft = hf_of(model_of(architecture, seed=1, num_hidden_layers=1, hidden_size=16))[0]
        eagle = drafter_of(self.target)
        self.models = {"target": self.target, "draft": draft, "eagle": eagle, "text_encoder": self.texts}
        self.engine = Engine(VQModels(**self.models), max_batch=3, device="cpu")

    @functools.cached_property
    def generated(self):
        """Greedy codes by the model's own `generate`."""
        return [generated(self.model, self.image, self.prompts(own), own.cfg) for own in requests()]

    def prompts(self, request: Request):
        """The tokens of a request's prompt, and those that guidance leads away from."""
        own = self.texts.features(request.prompt, 99, None)
        if request.negative_prompt is not None:
            return own, self.texts.features(request.negative_prompt, 99, None)
        return own, self.texts.null(own, 99)


# the fast set has the architecture that has all there is: groups of query heads, tokens among others, row ends
@pytest.fixture(scope="module", params=[*(pytest.param(name, marks=SLOW) for name in ARCHITECTURES[:3]), "emu3"])
def case(request):
    return Case(request.param)


def requests(method="ar", **changes):
    settings = {"cfg": GUIDANCE, "temperature": 1.0, "top_p": 1.0, "top_k": 0, **METHODS[method], **changes}
    return [Request(prompt=text, seed=i, method=method, **settings) for i, text in enumerate(PROMPTS)]


@pytest.mark.parametrize("method", ["ar", "sjd-pac", *(pytest.param(name, marks=SLOW) for name in OTHERS)])
def test_greedy_codes_are_those_of_its_own_generate(method, case):
    made = case.engine.generate(requests(method, temperature=0.0))
    for output, codes in zip(made, case.generated):
        assert torch.equal(output.tokens, codes)
        assert output.stats.backbone_calls <= len(codes)  # rows end for nothing


def uniforms(seed, length):
    none = torch.zeros(1, dtype=torch.int64)
    return noise.fine_uniform(torch.tensor(seed), Purpose.CODE, torch.arange(length), none, none)


def test_sampled_codes_are_those_of_its_own_layers(case):
    """One by one and in a batch, with the request's own uniform draws, the last one guided by a negative prompt."""
    own = requests()
    own[2] = own[2].but(negative_prompt="lowres")
    for request, output in zip(own, staggered(case.engine, own)):
        draws = uniforms(request.seed, case.image.side**2)
        expected = plain_codes(case.model, case.image, case.prompts(request), request.cfg, draws)
        assert torch.equal(output.tokens, expected)
        alone = case.engine.generate([request])[0]
        assert torch.equal(alone.tokens, expected)


@pytest.mark.parametrize("method", [pytest.param("eagle", marks=SLOW), "eagle2"])
def test_drafted_images_are_those_of_ar(method, case):
    """Sampled, same-image, in a ragged batch, and some codes are accepted; also after rows that are given."""
    own = requests(method)
    outputs = staggered(case.engine, own)
    for output, plain in zip(outputs, case.engine.generate(requests("ar"))):
        assert torch.equal(output.tokens, plain.tokens)
    assert sum(output.stats.backbone_calls for output in outputs) < len(own) * case.image.side**2
    given = {"image": outputs[0].tokens, "mask": torch.arange(case.image.side**2) >= 6}
    assert torch.equal(case.engine.generate([own[0].but(**given)])[0].tokens, outputs[0].tokens)


@pytest.mark.parametrize("rounds", [(0, 3, 1), (4, 4, 4), (8, 2, 13)], ids=str)
def test_logits_in_slots_are_those_without_a_cache(rounds, case):
    """Three prompts of unequal length, each as far as it is, some where a row begins."""
    runner, started = runner_of(case.models, 3), []
    for i, request in enumerate(requests()):
        started.append(Sequence(case.engine.resolve(request), slot=2 - i, key=i, stats=RoundStats()))
    with torch.inference_mode():
        runner.admit(started)
        for sequence, times in zip(started, rounds):
            for _ in range(times):
                find("ar", "VQ").run_round(runner, [sequence], Stopwatch(runner.device))
        batch = batch_of(runner, sorted(started, key=lambda sequence: sequence.slot))
        logits = guide(runner.target.output(runner.features(batch, runner.last(batch, 1)[0])), batch.scale)[:, 0]
        for sequence in started:
            codes, request = runner.codes[sequence.slot, : sequence.num_committed].unsqueeze(0), sequence.request
            expected = guided_logits(case.model, case.image, case.prompts(request), codes, request.cfg)[0]
            assert relative_error(logits[sequence.slot], expected) < 1e-5
    assert runner.cache("target").tensor.shape[3] == 2  # of four heads of queries


@pytest.mark.slow
def test_methods_side_by_side(case, small_mar):
    """Different methods, with and without guidance, in flight together, and beside them a MAR's images of classes."""
    engine = Engine(MARModels(small_mar), VQModels(**case.models), max_batch=3, device="cpu")
    own = [requests("sjd-pac")[2], requests("ar", cfg=1.0)[0], requests("sd")[1], requests("speculative")[0]]
    classes = [Request(i, i, method="ar", num_iter=3, num_sampling_steps=50, cfg=2.0) for i in range(2)]
    together = staggered(engine, [classes[0], *own[:2], classes[1], *own[2:]])
    for request, output in zip(classes, [together.pop(3), together.pop(0)][::-1]):
        assert relative_error(output.tokens, engine.generate([request])[0].tokens) < 1e-5
    for request, output in zip(own, together):
        assert torch.equal(output.tokens, case.engine.generate([request])[0].tokens)


@pytest.mark.slow
def test_the_first_rows_given(case):
    """Codes after given ones are those that follow them, where a row ends and inside one."""
    request = requests("sjd-pac", temperature=0.0)[0]
    whole = case.engine.generate([request])[0].tokens
    for count in (4, 6):
        given = {"image": whole, "mask": torch.arange(len(whole)) >= count}
        assert torch.equal(case.engine.generate([request.but(**given)])[0].tokens, whole)


def distribution(model, image, prompts, cfg, codes):
    """The probability of each of all sequences, float64."""
    every = sequences(codes, image.side**2)
    total = torch.zeros(len(every), dtype=torch.float64)
    for i in range(every.shape[1]):
        log_p = guided_logits(model, image, prompts, every[:, :i], cfg).double().log_softmax(1)
        total += log_p.gather(1, every[:, i : i + 1])[:, 0]
    return total.exp()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sjd", "sjd-pac", "sd", "eagle"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_whole_sequences_follow_its_distribution(architecture, method):
    """All 256 images of 2 times 2 codes."""
    tiny = {"codes": 4, "side": 2}
    more = tiny | {"num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 8}
    more |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = model_of(architecture, **more)
    target, texts, image = hf_of(model, **tiny)
    models = {"target": target, "text_encoder": texts, "eagle": drafter_of(target)}
    models["draft"] = hf_of(model_of(architecture, 1, **more), **tiny)[0]
    settings = {"window": 4, "pd_k": 2, "pd_d": 2} if method == "sjd-pac" else {"window": 3}
    settings = {"gamma": 3} if method in ("sd", "eagle") else settings
    request = request_of(method, label=None, prompt="blue", cfg=2.0, **settings)
    own = texts.features("blue", 99, None)
    expected = distribution(model, image, (own, texts.null(own, 99)), 2.0, 4)
    codes, _ = draw(models, request, 6000, batch=2000)
    assert p_value(counts(codes), expected) > SAME
    assert p_value(counts(codes), expected.roll(1)) < SAME  # it can fail
