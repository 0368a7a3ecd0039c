"""Plants known bugs, one at a time, in a copy of the package, and runs the fast tests that must catch them.

    python tests/planted_bugs.py [WORD ...]

WORDs choose the bugs whose name or file contains one of them; by default all are planted. Exits with 1 if a bug is
not caught, and with 2 if a fragment of the table does not occur exactly once in its file.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
COPIED = ("cspd", "mar", "tests", "scripts")
UNUSED = {".git", ".venv", ".pytest_cache", ".ruff_cache", ".mypy_cache"}
CAUGHT, PASSED = 1, 0  # exit codes of pytest


class Bug(NamedTuple):
    """A bug: `right` is replaced by `wrong` in `file`, and `test`, a file or one test of it, must fail."""

    name: str
    file: str
    right: str
    wrong: str
    test: str


BUGS = [
    Bug(
        "averaged weights under another key are not used",
        "mar/tensors.py",
        "if AVERAGED in str(key).lower():",
        "if str(key) in AVERAGED_KEYS:",
        "mar/test_checkpoint.py",
    ),
    Bug(
        "the first of several sizes with a file's shapes is taken",
        "mar/checkpoint.py",
        "        return added[0]\n",
        "        return first\n",
        "mar/test_checkpoint.py",
    ),
    Bug(
        "transformers asks whether to run code in a folder",
        "cspd/discrete/hf.py",
        "AutoTokenizer.from_pretrained(folder.path, local_files_only=True, trust_remote_code=False)",
        "AutoTokenizer.from_pretrained(folder.path, local_files_only=True)",
        "discrete/test_hf.py::test_code_in_a_directory_is_neither_run_nor_asked_about",
    ),
    Bug(
        "what pip leaves in a clone is a model",
        "cspd/models.py",
        'if not folder.match("*.egg-info") and folder.name',
        "if folder.name",
        "test_package.py",
    ),
    Bug(
        "the public names have no types",
        "cspd/__init__.py",
        "    from cspd.checkpoints import load\n",
        "",
        "test_package.py",
    ),
    Bug(
        "the site has no docstrings",
        "scripts/site_hooks.py",
        'lambda found: f"::: {found[1]}"',
        'lambda found: ""',
        "test_docs.py",
    ),
    Bug(
        "an unknown origin of a table is taken",
        "scripts/results.py",
        "or not content[field]:",
        "and False:",
        "test_docs.py",
    ),
    # the head: schedule and guidance
    Bug(
        "variance of a denoising step",
        "mar/head.py",
        "return 0.25 * (np.log(self.betas) + self",
        "return 0.26 * (np.log(self.betas) + self",
        "mar/test_head.py",
    ),
    Bug(
        "posterior variance is beta",
        "mar/head.py",
        "betas * (1 - previous) / (1 - alphas_cumprod)\n",
        "betas\n",
        "mar/test_head.py",
    ),
    Bug(
        "guidance the wrong way round",
        "cspd/heads/net.py",
        "torch.lerp(eps[-1], eps[-2], scale[..., -1:])",
        "torch.lerp(eps[-2], eps[-1], scale[..., -1:])",
        "heads/test_chain.py",
    ),
    Bug(
        "guidance forgets its third branch",
        "cspd/heads/net.py",
        "for i in range(len(eps) - 2):",
        "for i in range(0):",
        "heads/test_samplers.py",
    ),
    # the chain that samplers are given
    Bug(
        "a call that was not announced has the modulations of another step",
        "cspd/heads/chain.py",
        "if not self._expected or self._expected[0] != (step.timestep, branches):",
        "if not self._expected:",
        "heads/test_samplers.py",
    ),
    Bug(
        "announced calls have each other's modulations",
        "cspd/heads/chain.py",
        "chunks = modulated(self.head, self.z, timesteps,",
        "chunks = modulated(self.head, self.z, timesteps[::-1],",
        "heads/test_samplers.py",
    ),
    Bug(
        "a call at a time of one's own is one of the chain's",
        "cspd/heads/chain.py",
        "if following[:1] != [step]:",
        "if False:",
        "heads/test_samplers.py",
    ),
    Bug(
        "the unconditional branch is not counted",
        "cspd/heads/chain.py",
        "self.tally.evaluations += branches",
        "self.tally.evaluations += 1",
        "heads/test_samplers.py",
    ),
    Bug(
        "parts of a chain are not counted",
        "cspd/heads/chain.py",
        "        self.tally.parts.append((which, tally))\n",
        "",
        "heads/test_samplers.py",
    ),
    Bug(
        "a part of a chain has the noise of other rows",
        "cspd/heads/chain.py",
        "*(values[index] for values in others)",
        "*(values[: len(index)] for values in others)",
        "heads/test_samplers.py",
    ),
    Bug(
        "the last step of a chain adds noise",
        "cspd/heads/chain.py",
        "        sigma[-1] = 0  # the last step adds no noise\n",
        "",
        "heads/test_chain.py",
    ),
    # speculation on the denoising chain
    Bug(
        "every drafted state has twice its acceptance ratio",
        "cspd/heads/verify.py",
        "(log_uniform < log_ratio)",
        "(log_uniform < log_ratio + 0.69)",
        "heads/test_chains.py",
    ),
    Bug(
        "no draw is left to the residual",
        "cspd/heads/verify.py",
        "return y, log_uniform <= log_q_over_p",
        "return y, log_uniform < -torch.inf",
        "heads/test_verify.py",
    ),
    Bug(
        "the residual forgets what the mirror image gives",
        "cspd/heads/verify.py",
        "return wanted - from_mirror",
        "return wanted",
        "heads/test_verify.py",
    ),
    Bug(
        "a rejected state is committed",
        "cspd/heads/verify.py",
        "torch.where(rejected.unsqueeze(-1), resampled, y_last)",
        "y_last",
        "heads/test_chains.py",
    ),
    Bug(
        "of the candidates the last one is taken",
        "cspd/heads/verify.py",
        "accepted.int().argmax(-1), block",
        "block - 1 - accepted.flip(-1).int().argmax(-1), block",
        "heads/test_verify.py",
    ),
    Bug(
        "the first call of calibrated is in bf16",
        "cspd/heads/chain.py",
        "own_head = head if is_first else precision.prepare(head)",
        "own_head = precision.prepare(head)",
        "heads/test_chain.py",
    ),
    Bug(
        "the first call of calibrated is in TF32",
        "cspd/heads/chain.py",
        "            with self.precision.full():\n                out.raw",
        "            with self.precision.fast():\n                out.raw",
        "heads/test_chain.py",
    ),
    Bug(
        "the difference of calibrated is told 25 % too large",
        "cspd/heads/calibrated.py",
        "difference = squared**0.5",
        "difference = 1.25 * squared**0.5",
        "heads/test_calibrated.py",
    ),
    # causal models
    Bug(
        "the drift of the differential equation has half its score",
        "cspd/heads/chain.py",
        "of_x, of_v = 1 - dt, (1 + t) * dt",
        "of_x, of_v = 1 - dt / 2, (1 + t / 2) * dt",
        "heads/test_velocity.py",
    ),
    Bug(
        "the noise of the differential equation is that of half a step",
        "cspd/heads/chain.py",
        "0.5 * np.log(2 * (1 - t) * dt)",
        "0.5 * np.log((1 - t) * dt)",
        "heads/test_velocity.py",
    ),
    Bug(
        "the unconditional branch is given the conditional one's first token",
        "cspd/causal/runner.py",
        "is_own = (token == 1)",
        "is_own = (token < 0)",
        "causal/test_runner.py",
    ),
    Bug(
        "the first tokens of both branches have the same noise",
        "cspd/causal/runner.py",
        "torch.full_like(own.position, self.seq_len)",
        "torch.full_like(own.position, 0)",
        "causal/test_runner.py",
    ),
    Bug(
        "the cells of a patch do not look at each other",
        "cspd/causal/models.py",
        "last = torch.where(column < first, column, end_of_block)",
        "last = column",
        "causal/test_models.py",
    ),
    Bug(
        "an image's colours depend on its batch",
        "cspd/causal/runner.py",
        "else latents.contiguous()",
        "else latents",
        "causal/test_runner.py",
    ),
    Bug(
        "the statistics of a latent are rounded by its batch",
        "cspd/causal/autoencoders.py",
        "self.gamma(fill(deviation))",
        "self.gamma(deviation)",
        "causal/test_runner.py",
    ),
    Bug(
        "conditions are rounded by their batch",
        "cspd/causal/runner.py",
        "in_tiles = filled(num_branches * size) // num_branches",
        "in_tiles = size",
        "causal/test_runner.py",
    ),
    # the noise
    Bug(
        "acceptance draws shared with the initial noise",
        "cspd/noise.py",
        "(Purpose.ACCEPT, accept_index)",
        "(Purpose.INIT, accept_index)",
        "test_noise.py",
    ),
    Bug(
        "acceptance draws shared with the drafted tokens",
        "cspd/noise.py",
        "TOKEN_ACCEPT = 10",
        "TOKEN_ACCEPT = 9",
        "discrete/test_laws.py",
    ),
    Bug(
        "two purposes have one number",
        "cspd/noise.py",
        "CODE_RESIDUAL = 11",
        "CODE_RESIDUAL = 9",
        "test_noise.py",
    ),
    Bug(
        "a rejected code is replaced by its own draw",
        "cspd/discrete/drafts.py",
        "(Purpose.CODE_RESIDUAL, 0, 1)",
        "(Purpose.CODE, 0, 1)",
        "discrete/test_laws.py::test_a_rejected_draft_is_replaced_by_a_draw_of_its_own",
    ),
    Bug(
        "variance of normal draws",
        "cspd/noise.py",
        "(-2 * u1.log()).sqrt()",
        "(-1.9 * u1.log()).sqrt()",
        "test_noise.py",
    ),
    Bug("a seed's upper half is ignored", "cspd/noise.py", "seed >> 32 & MASK", "seed & 0", "test_noise.py"),
    Bug("nine Philox rounds", "cspd/noise.py", "ROUNDS = 10\n", "ROUNDS = 9\n", "test_noise.py"),
    # solvers and schedules of chain lengths
    Bug(
        "the second-order correction is inverted",
        "cspd/heads/samplers.py",
        "h[1:-1] / (2 * h[:-2])",
        "h[:-2] / (2 * h[1:-1])",
        "heads/test_solvers.py",
    ),
    Bug(
        "high frequencies weigh least",
        "cspd/heads/samplers.py",
        "(amplitude * (1 + frequency))",
        "(amplitude * (2 - frequency))",
        "masked/test_orders.py",
    ),
    # the order of tokens and the backbone's caches
    Bug(
        "guidance of the iteration before",
        "cspd/masked/orders.py",
        "(seq_len - left) / seq_len",
        "(seq_len - np.append(seq_len, left[:-1])) / seq_len",
        "masked/test_orders.py",
    ),
    Bug(
        "the cosine schedule is one iteration late",
        "cspd/masked/orders.py",
        "np.pi / 2 * (iteration + 1)",
        "np.pi / 2 * iteration",
        "masked/test_runner.py",
    ),
    Bug(
        "the cache is refreshed late",
        "cspd/masked/backbones.py",
        "(iteration - warmup) % refresh == 0",
        "(iteration - warmup) % (refresh + 1) == 0",
        "masked/test_backbones.py",
    ),
    # CSpD
    Bug(
        "the ratio of whole tokens without Sigma",
        "cspd/masked/cspd.py",
        "log_path = log_big_sigma + ",
        "log_path = 0 * log_big_sigma + ",
        "masked/test_cspd.py",
    ),
    Bug(
        "the noise of chains that do not share it is left out of their ratio",
        "cspd/masked/cspd.py",
        "(p.log_noise - q.log_noise)",
        "0 * (p.log_noise - q.log_noise)",
        "masked/test_cspd.py::test_the_ratio_is_that_of_equation_1",
    ),
    Bug(
        "no token follows drafts that were all accepted",
        "cspd/masked/cspd.py",
        "has_next = is_sequential & (drafted_end < runner.seq_len)",
        "has_next = drafted_end < 0",
        "masked/test_cspd.py::test_a_draft_that_is_the_target_gives_the_images_of_ar",
    ),
    Bug(
        "the token after the drafts is drawn without the last one",
        "cspd/masked/cspd.py",
        "num_before += range(num_committed, num_committed + count)",
        "num_before += [min(n, num_committed + count - 2) for n in range(num_committed, num_committed + count)]",
        "masked/test_cspd.py::test_a_draft_that_is_the_target_gives_the_images_of_ar",
    ),
    Bug(
        "tokens after the first rejection are committed",
        "cspd/masked/cspd.py",
        "own.cumprod().sum()",
        "own.sum()",
        "masked/test_cspd.py",
    ),
    Bug(
        "eq. 35 without the token after the accepted ones",
        "cspd/comparison/compare.py",
        "for i in range(gamma + 1))",
        "for i in range(1, gamma + 1))",
        "comparison/test_compare.py::test_the_expected_speed_up_is_that_of_the_process_it_describes",
    ),
    Bug(
        "a row's speed is measured against another batch size",
        "cspd/comparison/study.py",
        "wanted = request, (*files[:-1], row.engine.num_slots)",
        "wanted = request, files[:-1]",
        "comparison/test_study.py::test_rows_of_another_batch_size_have_their_own_baseline",
    ),
    Bug(
        "all repeats have the scores of the first",
        "cspd/comparison/compare.py",
        "for begin in range(0, len(images), num):",
        "for begin in [0] * repeats:",
        "comparison/test_compare.py::test_repeats_have_other_seeds_and_their_own_scores",
    ),
    # rules for drafted VQ tokens
    Bug(
        "the residual ignores what was accepted",
        "cspd/discrete/rules.py",
        "P - Q * f, P",
        "P - Q, P",
        "discrete/test_rules.py",
    ),
    Bug(
        "the residual is not renormalised",
        "cspd/discrete/rules.py",
        "torch.where(total > 0, weights / total,",
        "torch.where(total > 0, weights,",
        "discrete/test_rules.py",
    ),
    Bug(
        "the acceptance ratio is upside down",
        "cspd/discrete/rules.py",
        "(mass / Q).clamp_(max=1)",
        "(Q / mass).clamp_(max=1)",
        "discrete/test_rules.py",
    ),
    Bug(
        "siblings are drawn with replacement",
        "cspd/discrete/distributions.py",
        "left.scatter_(-1, siblings[-1].unsqueeze(-1), 0)",
        "pass",
        "discrete/test_rules.py",
    ),
    Bug(
        "a sibling is verified with the first one's draft distribution",
        "cspd/discrete/trees.py",
        "Q = without(Q[..., :size, :], candidates[..., :size, rank - 1])",
        "Q = Q[..., :size, :]",
        "discrete/test_rules.py",
    ),
    Bug(
        "the relaxation's mean is not delta",
        "cspd/discrete/rules.py",
        "for i in range(length))",
        "for i in range(1, length + 1))",
        "discrete/test_rules.py",
    ),
    Bug(
        "a chosen code absorbs up to the limit",
        "cspd/discrete/rules.py",
        "given = around.cumsum(-1) < limit",
        "given = around.cumsum(-1) <= limit",
        "discrete/test_rules.py::test_pooling_is_the_plain_loop",
    ),
    Bug(
        "a code absorbs up to the limit",
        "cspd/discrete/rules.py",
        "reached = sums >= most.unsqueeze(1)",
        "reached = sums > most.unsqueeze(1)",
        "discrete/test_rules.py::test_pooling_is_the_plain_loop",
    ),
    Bug(
        "a divergence without the token that takes the mass",
        "cspd/discrete/rules.py",
        "return (of_taker + mass * math.log(2)) / 2",
        "return mass * math.log(2) / 2",
        "discrete/test_rules.py::test_lantern_commits_what_its_paper_says",
    ),
    Bug(
        "random neighbours are near ones",
        "cspd/discrete/rules.py",
        'if metric == "random":',
        'if metric == "any":',
        "discrete/test_bundled.py::test_random_neighbours_accept_fewer_tokens_than_near_ones",
    ),
    Bug(
        "a changed token's offsets are one late",
        "scripts/measure/ambiguity.py",
        "sums[0, 1 : 1 + num_after] += distance[position + 1 :]",
        "sums[0, :num_after] += distance[position + 1 :]",
        "discrete/test_ambiguity.py::test_the_change_of_one_token_by_offset",
    ),
    Bug(
        "the released code absorbs less at ties",
        "cspd/discrete/rules.py",
        "return limit.nextafter(torch.full_like(P, math.inf))",
        "return limit",
        "discrete/test_rules.py::test_published_lantern_does_what_its_code_does",
    ),
    Bug(
        "a group lacks its last token",
        "cspd/discrete/rules.py",
        "rank + (self.group + 1) // 2",
        "rank + self.group // 2",
        "discrete/test_rules.py",
    ),
    Bug(
        "guidance of logits leads away from the wrong branch",
        "cspd/discrete/distributions.py",
        ".mul_(scale).add_(null)",
        ".mul_(scale).add_(conditional)",
        "discrete/test_runner.py",
    ),
    Bug(
        "top-p drops the token that reaches the mass",
        "cspd/discrete/distributions.py",
        "mass_before = mass.cumsum(-1) - mass",
        "mass_before = mass.cumsum(-1)",
        "discrete/test_runner.py",
    ),
    Bug(
        "a Jacobi window forgets its draft distributions",
        "cspd/discrete/jacobi.py",
        "= torch.where(inside, Q, 1 / vocabulary)",
        "= torch.full_like(Q, 1 / vocabulary)",
        "discrete/test_laws.py",
    ),
    Bug(
        "a sample of a trace is every n-th token",
        "cspd/heads/calibration.py",
        "which = torch.randperm(len(self.image), generator=torch.Generator().manual_seed(0))[:num].sort().values",
        "which = torch.arange(0, len(self.image), max(1, len(self.image) // num))",
        "heads/test_calibrated.py::test_some_tokens_are_of_all_images",
    ),
    Bug(
        "parts of a comparison are not balanced",
        "cspd/comparison/compare.py",
        "cycle=cycle_of(of_images)",
        "cycle=cycle_of(subjects)",
        "comparison/test_compare.py::test_features_are_taken_once",
    ),
    Bug(
        "a request whose budget chose the exact rule keeps the rule's parameter",
        "cspd/discrete/drafts.py",
        "chosen = dict.fromkeys(option.name for option in PARAMETERS[request.rule]) | chosen",
        "pass",
        "discrete/test_budget.py::test_what_a_budget_chose_can_be_asked_for_again",
    ),
    Bug(
        "an audit counts one of the verified codes",
        "cspd/discrete/prices.py",
        "num_tried * divergence(C, P)",
        "divergence(C, P)",
        "discrete/test_prices.py::test_every_verified_code_counts",
    ),
    Bug(
        "an audit takes the first depth for all",
        "cspd/discrete/prices.py",
        "        depth[each, position],\n",
        "        depth[each, 0],\n",
        "discrete/test_prices.py::test_every_verified_code_counts",
    ),
    Bug(
        "a price forgets how likely rejections are",
        "cspd/discrete/prices.py",
        "torch.where(is_present, weight * share, weight)",
        "torch.where(is_present, share, weight)",
        "discrete/test_prices.py::test_the_distribution_of_a_committed_token",
    ),
    Bug(
        "a price has its siblings drawn with replacement",
        "cspd/discrete/prices.py",
        "q = None if q is None else without(q, x)",
        "q = q",
        "discrete/test_prices.py::test_the_divergence_with_siblings_is_hardly_too_large",
    ),
    Bug(
        "an audit is by the divergence the other way round",
        "cspd/discrete/prices.py",
        "terms = C * (C / P).log()",
        "terms = P * (P / C).log()",
        "discrete/test_prices.py",
    ),
    Bug(
        "a budget is exceeded by one value of the dial",
        "cspd/discrete/tuning.py",
        "{name: values[count - 1]}",
        "{name: values[min(count, len(values) - 1)]}",
        "discrete/test_budget.py",
    ),
    Bug(
        "rows look at tokens that are not decoded",
        "cspd/discrete/zipar.py",
        "(place <= reached - lag * row)",
        "(place <= reached)",
        "discrete/test_zipar.py",
    ),
    Bug(
        "a proxy is never replaced",
        "cspd/discrete/zipar.py",
        "torch.where(head_row > 0, 0, reached)",
        "reached",
        "discrete/test_zipar.py",
    ),
    # requests and figures
    Bug(
        "pixels are truncated",
        "cspd/pixels.py",
        "(image * 255).round().to(torch.uint8)",
        "(image * 255).to(torch.uint8)",
        "evaluation/test_metrics.py",
    ),
    Bug(
        "rare sequences are not tested",
        "tests/toys.py",
        "2 * min(of_rare, of_others)",
        "2 * of_others",
        "discrete/test_laws.py::test_the_p_value_counts_every_draw",
    ),
    Bug(
        "a request of a client that left keeps its slot",
        "cspd/serving/loop.py",
        "                self.engine.cancel(job.sequence.ticket)\n",
        "                pass\n",
        "serving/test_v1.py::test_a_client_that_leaves_is_cancelled",
    ),
    Bug(
        "a server that closes leaves queued requests without an answer",
        "cspd/serving/loop.py",
        "            self._has_ended = True\n            self._make_calls()\n",
        "            self._has_ended = True\n",
        "serving/test_serve_limits.py::test_clients_that_wait_for_a_server_that_closes",
    ),
    Bug(
        "a calibration goes on while the server closes",
        "cspd/serving/loop.py",
        "        if not self._is_open:\n            raise Closing\n",
        "",
        "serving/test_serve_limits.py::test_clients_that_wait_for_a_server_that_closes",
    ),
    Bug(
        "a request that comes as the thread ends is lost",
        "cspd/serving/loop.py",
        "        if self._has_ended:\n            self._make_calls()\n",
        "",
        "serving/test_serve_limits.py::test_a_request_that_comes_as_the_thread_ends",
    ),
    Bug(
        "an error of Ray Serve leaves a client waiting",
        "cspd/serving/ray_serve.py",
        "            if job in self.jobs:  #",
        "            if False:  #",
        "serving/test_replicas.py",
    ),
    Bug(
        "an error of a round whose requests were cancelled is lost",
        "cspd/engine.py",
        "            if not self._drop(error, models):\n",
        "            if self._drop(error, models) is None:\n",
        "test_engine.py::test_an_error_that_no_request_is_left_for_is_said",
    ),
    Bug(
        "under a prefix, the API needs no key",
        "cspd/serving/access.py",
        'return scope["path"].removeprefix(scope.get("root_path", ""))',
        'return scope["path"]',
        "serving/test_v1.py::test_under_a_prefix",
    ),
    Bug(
        "all images of a call have one seed",
        "cspd/request.py",
        "seeds = [first + i for i in range(num)]",
        "seeds = [first for _ in range(num)]",
        "test_checkpoints.py",
    ),
    Bug(
        "every second seed is evaluated",
        "cspd/evaluation/run.py",
        'self.manifest["seed"] + index',
        'self.manifest["seed"] + 2 * index',
        "evaluation/test_run.py",
    ),
    Bug(
        "pairs of images are not kept together",
        "cspd/evaluation/scores.py",
        "torch.cat([signs, -signs], dim=1)",
        "torch.cat([signs, -signs.flip(1)], dim=1)",
        "evaluation/test_metrics.py",
    ),
    Bug(
        "accepted lengths of the same seed are tested as if independent",
        "cspd/comparison/compare.py",
        "change(own, base, same_seeds=True)",
        "change(own, base, same_seeds=False)",
        "comparison/test_compare.py",
    ),
    Bug(
        "spatial features of other channels",
        "cspd/evaluation/metrics.py",
        "output[:, :7].permute",
        "output[:, 7:14].permute",
        "evaluation/test_adm.py",
    ),
    Bug(
        "neighbourhoods of four",
        "cspd/evaluation/scores.py",
        "NEIGHBOURS = 3  #",
        "NEIGHBOURS = 4  #",
        "evaluation/test_adm.py",
    ),
    Bug(
        "the Inception score of smaller parts",
        "cspd/evaluation/scores.py",
        "SPLIT = 5000",
        "SPLIT = 500",
        "evaluation/test_adm.py",
    ),
    Bug(
        "the Inception score in the order of the images",
        "cspd/evaluation/scores.py",
        "np.random.RandomState(SHUFFLING).permutation(len(logits))",
        "np.arange(len(logits))",
        "evaluation/test_adm.py",
    ),
    Bug(
        "objects are mapped",
        "cspd/evaluation/arrays.py",
        'NUMBERS = "biuf"',
        'NUMBERS = "biufcV"',
        "evaluation/test_reference.py",
    ),
    Bug(
        "an image is compared with itself",
        "cspd/evaluation/scores.py",
        "(_row_sums(x, x, kernel) - _diagonal(x, kernel))",
        "_row_sums(x, x, kernel)",
        "evaluation/test_adm.py",
    ),
    Bug(
        "the error of FID without the reference's transport",
        "cspd/evaluation/scores.py",
        "(centred * (centred - centred @ transport))",
        "(centred * centred)",
        "evaluation/test_adm.py",
    ),
    Bug(
        "a resolution of one set of images only",
        "cspd/evaluation/scores.py",
        "math.sqrt(2) * standard_error(self.parts)",
        "standard_error(self.parts)",
        "evaluation/test_adm.py",
    ),
    Bug(
        "Holm's correction without its number",
        "cspd/evaluation/scores.py",
        "(len(given) - rank) * p",
        "p",
        "evaluation/test_adm.py",
    ),
    Bug(
        "the best images are shown as the worst",
        "cspd/comparison/compare.py",
        "np.argsort(-of_image",
        "np.argsort(of_image",
        "comparison/test_compare.py::test_the_worst_images_and_tokens_are_those_that_differ_most",
    ),
    Bug(
        "what is reported is what chose",
        "cspd/heads/calibrated.py",
        "squares = _squares(head, reported,",
        "squares = _squares(head, choosing,",
        "heads/test_calibrated.py::test_what_is_reported_is_not_the_value_that_chose",
    ),
    Bug(
        "tokens of one image count as independent",
        "cspd/heads/calibration.py",
        "    _, of_image = image.unique(return_inverse=True)\n",
        "    of_image = torch.arange(len(image), device=image.device)\n",
        "heads/test_calibrated.py::test_the_standard_error_is_that_of_images_and_not_of_tokens",
    ),
    Bug(
        "a difference that is 25 % too small",
        "cspd/heads/calibrated.py",
        "difference = squared**0.5",
        "difference = 0.75 * squared**0.5",
        "heads/test_calibrated.py::test_more_calls_come_nearer_and_the_measured_values_hold_for_other_tokens",
    ),
    Bug(
        "a standard error without its root",
        "cspd/evaluation/metrics.py",
        "/ len(values) ** 0.5 if",
        "/ len(values) if",
        "evaluation/test_clip.py",
    ),
    Bug(
        "rejected siblings are not taken out of the residual",
        "cspd/discrete/trees.py",
        "left = rule.resample(P, Q, f, x)",
        "left = P",
        "discrete/test_rules.py",
    ),
    Bug(
        "siblings are the likeliest tokens",
        "cspd/discrete/jacobi.py",
        "draw_siblings(left, draws.siblings)",
        "left.topk(draws.siblings.shape[-1]).indices",
        "discrete/test_laws.py",
    ),
    Bug(
        "a rejected token is replaced by a draw of P",
        "cspd/discrete/jacobi.py",
        "sample(on_path.residual, u)",
        "sample(P[:, :path], u)",
        "discrete/test_laws.py",
    ),
    Bug(
        "draws of later positions are of their neighbours",
        "cspd/discrete/runner.py",
        "return self.draws[batch.slot.unsqueeze(1), position]",
        "return self.draws[batch.slot.unsqueeze(1), position + (ahead > 0)]",
        "discrete/test_same_image.py",
    ),
    Bug(
        "siblings are compared with the token of another one",
        "cspd/discrete/trees.py",
        "tokens == drawn.gather(1, above)",
        "tokens.roll(1, 1) == drawn.gather(1, above)",
        "discrete/test_same_image.py",
    ),
    Bug(
        "given tokens are shifted by two",
        "cspd/discrete/runner.py",
        "inputs = tokens.roll(1, 1)",
        "inputs = tokens.roll(2, 1)",
        "discrete/test_runner.py",
    ),
    # machines that lack something
    Bug(
        "graphs of two engines are captured on one stream",
        "cspd/graphs.py",
        "if stream not in _taken:",
        "if True:",
        "test_graphs.py",
    ),
    Bug(
        "a chain computes the modulations of all steps at once",
        "cspd/heads/chain.py",
        "return int(min(GPU_BYTES, GPU_SHARE * all_bytes(device)))",
        "return most_bytes(device)",
        "test_graph_memory.py",
    ),
    Bug(
        "what torch's cache holds hides the memory of a graph",
        "cspd/graphs.py",
        "        torch.cuda.empty_cache()\n",
        "",
        "test_graph_memory.py",
    ),
    Bug(
        "a kernel that computes rubbish is used",
        "cspd/kernels/__init__.py",
        "if drawn != [OF_ZEROS]:",
        "if False:",
        "test_kernels.py",
    ),
    Bug(
        "a failed compilation ends a round",
        "cspd/graphs.py",
        "        except Exception as error:  # the compilers raise all kinds\n",
        "        except Exception as error:\n            raise\n",
        "test_graphs.py",
    ),
    # prices and budgets
    Bug(
        "prices leave out the steps that are not evaluated",
        "cspd/heads/prices.py",
        "total[rows] += every * divergence(p, q)",
        "total[rows] += divergence(p, q)",
        "heads/test_prices.py",
    ),
    Bug(
        "prices are KL(q || p)",
        "cspd/heads/prices.py",
        "total += divergence(p, (mean, log_sigma))",
        "total += divergence((mean, log_sigma), p)",
        "heads/test_prices.py",
    ),
    Bug(
        "prices reuse no difference of the branches",
        "cspd/heads/prices.py",
        "yield (eps[0] if difference is None else eps[0] + difference), v[0]",
        "yield (eps[0] + difference if len(eps) == 2 else eps[0]), v[0]",
        "heads/test_prices.py",
    ),
    Bug(
        "an image alone has no error",
        "cspd/heads/calibration.py",
        "if (image == image[0]).all():",
        "if False:",
        "heads/test_prices.py",
    ),
    Bug(
        "a refresh counts as a lazy iteration too",
        "cspd/masked/plan.py",
        "np.cumsum(np.triu(values, 1), axis=1)",
        "np.cumsum(np.triu(values), axis=1)",
        "masked/test_budget.py",
    ),
    Bug(
        "prices of cached backbones lie one lag too early",
        "cspd/masked/prices.py",
        "prices[row, column, 1 : 1 + len(later)]",
        "prices[row, column, : len(later)]",
        "masked/test_budget.py",
    ),
    Bug(
        "prices fall with the lag",
        "cspd/masked/plan.py",
        "weights=weights).x",
        "weights=weights, increasing=False).x",
        "masked/test_budget.py",
    ),
    Bug(
        "the factors of anchors are those of all lags",
        "cspd/masked/plan.py",
        "(is_measured @ of_lag + TINY)",
        "(of_lag.sum() + TINY)",
        "masked/test_budget.py",
    ),
    Bug(
        "an audit takes the exact conditions",
        "cspd/masked/prices.py",
        'if own.batch[0].request.backbone == "full" else cached_conditions',
        "if True else conditions",
        "masked/test_budget.py",
    ),
    Bug(
        "an audit's tokens weigh alike in iterations of few and of many tokens",
        "cspd/masked/audit.py",
        "return iterations.tolist(), times / counts[iterations]",
        "return iterations.tolist(), np.ones(len(times)) / counts[iterations]",
        "masked/test_budget.py",
    ),
    Bug(
        "a plan is accepted by its price without the standard error",
        "cspd/masked/budget.py",
        "likely = sum(plan.price)",
        "likely = plan.price.divergence",
        "masked/test_budget.py",
    ),
    Bug(
        "intervals of tune are of infinitely many parts",
        "cspd/comparison/report.py",
        'student_limit(loss["degrees"])',
        "1.96",
        "comparison/test_tune.py",
    ),
    Bug(
        "GenEval's folder is made without metadata",
        "cspd/cli/merge.py",
        'if path.suffix != ".jsonl":',
        "if False:",
        "cli/test_merge.py",
    ),
    Bug(
        "a record reaches out of its folder through a link",
        "cspd/files.py",
        "if parent.is_symlink() or parent.is_file():",
        "if parent.is_file():",
        "test_runs.py::test_a_record_cannot_make_us_remove_other_files",
    ),
    Bug(
        "a small shard fills the memory",
        "cspd/files.py",
        "if sum(member.file_size for member in file.zip.infolist()) > size:",
        "if False:",
        "cli/test_merge.py::test_verify_fills_no_memory_from_a_small_file",
    ),
    Bug(
        "a copy of the weights is another run",
        "cspd/files.py",
        'names = {"file", "bytes"} if "sha256" in settings else set()',
        "names = set()",
        "test_runs.py::test_a_file_is_its_content_in_any_folder_and_is_read_once",
    ),
    Bug(
        "columns of an array are cached in the order of its memory",
        "cspd/files.py",
        'np.asarray(value, order="C")',
        "np.asarray(value)",
        "heads/test_calibration.py::test_columns_of_an_array_are_read_as_they_were_written",
    ),
    Bug(
        "labels of a plot are written over each other",
        "cspd/plots.py",
        "        taken.append(box)\n",
        "",
        "comparison/test_report.py::test_labels_and_legend_hide_nothing",
    ),
    Bug(
        "the page leaves out the price that is predicted",
        "cspd/serving/loop.py",
        '    "divergence": ("predicted, nats per token", ".3g"),\n',
        "",
        "serving/test_app.py",
    ),
    Bug(
        "axes that were given have no price",
        "cspd/masked/budget.py",
        "return planner.priced(request, BudgetPlan(given, Price(0.0, 0.0), None))",
        "return BudgetPlan(given, Price(0.0, 0.0), None)",
        "masked/test_budget.py",
    ),
    Bug(
        "positions that nothing attends to are selected",
        "cspd/masked/backbones.py",
        "score = -_attention(",
        "score = _attention(",
        "masked/test_backbones.py",
    ),
    Bug(
        "the Halton sequence begins at 0",
        "cspd/masked/orders.py",
        "itertools.count(1)",
        "itertools.count(0)",
        "masked/test_orders.py",
    ),
    # training of SphereAR
    Bug(
        "cells of an S-VAE too close to their means",
        "scripts/train/spherical.py",
        "Beta(concentration.cpu() + rest / 2, rest / 2)",
        "Beta(concentration.cpu() + rest, rest / 2)",
        "test_spheres.py",
    ),
    Bug(
        "divergence of an S-VAE's cells from a smaller sphere",
        "scripts/train/spherical.py",
        "- math.lgamma(dim / 2)",
        "- math.lgamma(dim)",
        "test_spheres.py",
    ),
    Bug(
        "velocity from token to noise",
        "scripts/train/train_sphere.py",
        "torch.lerp(noise, x1, t.view(",
        "torch.lerp(x1, noise, t.view(",
        "test_spheres.py",
    ),
    Bug(
        "cells of a patch in the order of rows",
        "scripts/train/train_patches.py",
        "grid.transpose(2, 3).flatten(3)",
        "grid.flatten(3)",
        "test_patches.py",
    ),
    Bug(
        "conditions of a token, not of an image, follow each other",
        "scripts/train/train_patches.py",
        "torch.stack(kept, dim=2)",
        "torch.stack(kept, dim=1)",
        "test_patches.py",
    ),
    Bug(
        "score too large in the authors' loop",
        "scripts/measure/sphere_loop.py",
        "drift = v + (1 - t) * score",
        "drift = v + score",
        "test_spheres.py",
    ),
    Bug(
        "an invented cookie is a client of its own",
        "cspd/serving/bodies.py",
        "return cookie if is_visitor(cookie, address) else address",
        "return cookie or address",
        "serving/test_app.py::test_an_invented_cookie_is_nobody",
    ),
    Bug(
        "silent connections stay open",
        "cspd/serving/connections.py",
        "if now - silent[connection].since > patience:",
        "if False:",
        "serving/test_serve_limits.py::test_silent_connections_are_closed",
    ),
    Bug(
        "a new calibration is made although it is refused",
        "cspd/files.py",
        "            ask(begins=True)\n",
        "",
        "serving/test_serve_limits.py::test_new_calibrations_are_refused",
    ),
    # what is timed
    Bug(
        "times of a busy machine are cached",
        "cspd/tuner.py",
        "in_file=found.unsteadiness <= STEADY",
        "in_file=True",
        "heads/test_tuning.py",
    ),
    Bug(
        "times of another device are read",
        "cspd/tuner.py",
        "            **of_device(self.device),\n",
        "",
        "heads/test_tuning.py",
    ),
    Bug(
        "times of a batch beyond the largest that was timed are too short",
        "cspd/tuner.py",
        " * np.maximum(1.0, np.divide(size, sizes[-1]))",
        "",
        "test_tuner.py",
    ),
    Bug(
        "the slower kind of round goes on",
        "cspd/discrete/fastest_draft.py",
        "return by_draft / self.tokens <= MARGIN * plain",
        "return by_draft / self.tokens >= MARGIN * plain",
        "discrete/test_family.py::test_the_faster_kind_of_round_goes_on",
    ),
    Bug(
        "a round of baseline sampling takes the place of a draft that was asked for",
        "cspd/discrete/fastest_draft.py",
        "if runner.late or not all(map(_is_open, sequences)):",
        "if runner.late:",
        "discrete/test_family.py::test_rounds_of_both_kinds_sample_the_tokens_of_ar",
    ),
    Bug(
        "a window is chosen for all slots",
        "cspd/engine.py",
        "max(1, min(self.num_slots, at_once))",
        "self.num_slots",
        "test_engine.py::test_a_window_is_chosen_for_the_images_of_the_call",
    ),
    Bug(
        "models of one family share CUDA graphs",
        "cspd/engine.py",
        "            own = Graphs(self.device, graphs)",
        "            own = next(iter(self.runners.values())).graphs if self.runners else Graphs(self.device, graphs)",
        "test_engine.py::test_models_share_slots_and_turns",
    ),
    Bug(
        "models of one family share a round",
        "cspd/engine.py",
        "key=(prepared.model, method.round_key(request))",
        "key=method.round_key(request)",
        "test_engine.py::test_models_share_slots_and_turns",
    ),
    Bug(
        "an error of a model drops the requests to all",
        "cspd/engine.py",
        "with self._dropping([ran], errors):",
        "with self._dropping(self.runners, errors):",
        "test_engine.py::test_an_error_of_a_model_is_its_own",
    ),
    Bug(
        "the first kind of rounds keeps its turn",
        "cspd/engine.py",
        "        batch = self.running.pop(key)\n        self.running[key] = batch",
        "        batch = self.running[key]",
        "test_engine.py::test_no_model_keeps_another_one_waiting",
    ),
    Bug(
        "what methods keep is not freed with the last sequence",
        "cspd/engine.py",
        "                sequence.shared.clear()",
        "                pass",
        "test_scheduler.py",
    ),
    Bug(
        "a sequence that joins others does not know what methods keep of them",
        "cspd/engine.py",
        "                sequence.shared = batch[0].shared\n",
        "                pass\n",
        "test_scheduler.py",
    ),
    Bug(
        "an output goes to another stream",
        "cspd/engine.py",
        "        sequence.results.put((sequence, result))\n",
        "        next(iter(self._unfinished.values()), sequence).results.put((sequence, result))\n",
        "test_engine.py::test_streams_and_steps_in_turn",
    ),
    Bug(
        "a sequence that is cancelled in a round keeps its slot",
        "cspd/engine.py",
        "        self._cancelled.update(cancelled)\n",
        "",
        "test_engine.py::test_a_stream_that_is_left_in_the_middle_of_a_round",
    ),
    Bug(
        "a cancelled request gives an output, too",
        "cspd/engine.py",
        "        if self._unfinished.pop(sequence.ticket, None) is None:\n            return False\n",
        "        self._unfinished.pop(sequence.ticket, None)\n",
        "test_engine.py::test_a_request_whose_image_is_being_decoded_is_cancelled",
    ),
    Bug(
        "a thread that has just run a round is the next one again",
        "cspd/engine.py",
        "self._line.append(own)",
        "self._line.insert(1, own)",
        "test_engine.py::test_threads_take_turns",
    ),
    Bug(
        "the seconds of timing are the run's",
        "cspd/cli/sample.py",
        "        seconds -= plain.seconds\n",
        "        seconds += plain.seconds\n",
        "test_speed.py::test_the_seconds_of_timing_are_not_the_runs",
    ),
    Bug(
        "a choice by chance is sure",
        "cspd/comparison/compare.py",
        "trials[i].excess + is_sure * trials[i].reach <= 0",
        "trials[i].excess <= 0",
        "comparison/test_tune.py::test_what_chance_may_have_given_is_not_chosen",
    ),
    Bug(
        "noise drawn for a last step for which the code draws none",
        "cspd/heads/net.py",
        "range(len(step) - (not self.last))",
        "range(len(step))",
        "test_seams.py::test_the_full_chain_is_the_codes_own",
    ),
    Bug(
        "replaced layers of an accelerated head are not seen",
        "cspd/seams.py",
        "        if layers != self._layers:\n",
        "        if False:\n",
        "test_seams.py::test_other_weights_are_used_and_learned_anew",
    ),
    Bug(
        "fits of other weights are kept",
        "cspd/seams.py",
        "            self._learned.clear()\n",
        "",
        "test_seams.py::test_other_weights_are_used_and_learned_anew",
    ),
    Bug(
        "a replaced handle takes its successor away",
        "cspd/seams.py",
        " and replaced.accelerated is self:",
        ":",
        "test_seams.py::test_the_last_call_of_accelerate_counts",
    ),
    Bug(
        "half precision weights leave the caller's autocast",
        "cspd/seams.py",
        "contextlib.nullcontext() if self.is_half else super().full()",
        "super().full()",
        "test_seams.py::test_half_precision_weights",
    ),
    Bug(
        "chains that are not finite are learned from",
        "cspd/heads/learned.py",
        "if all(values.isfinite().all() for values in trace):",
        "if True:",
        "test_seams.py::test_nothing_is_learned_from_chains_that_are_not_finite",
    ),
    Bug(
        "a window longer than the chain",
        "cspd/heads/learned.py",
        "        window = min(window, len(self.s) - 1)\n",
        "",
        "test_seams.py::test_chains_may_be_shorter_than_the_settings",
    ),
    Bug(
        "the last noise of NextStep-1.1 is left out",
        "cspd/seams.py",
        "            tokens = tokens + call.temperature * sigma * last\n",
        "            pass\n",
        "test_seams.py::test_tokens_have_the_codes_distribution",
    ),
    Bug(
        "NextStep-1's noise is not repeated",
        "cspd/seams.py",
        "TorchNoise(z.device, normal, repeat=drawn, last=is_newer)",
        "TorchNoise(z.device, normal, last=is_newer)",
        "test_seams.py::test_repeated_noise_stays_repeated",
    ),
    Bug(
        "copies of a model stay accelerated",
        "cspd/seams.py",
        '        return getattr, (self.accelerated.seam.module, "sample")\n',
        "        return type(self), (self.accelerated,)\n",
        "test_seams.py::test_copies_have_the_codes_own_sampler",
    ),
]


def stale(bugs: list[Bug]) -> list[str]:
    """What in the table no longer fits the package: fragments that do not occur exactly once, tests not found."""
    found = []
    for bug in bugs:
        occurrences = (ROOT / bug.file).read_text().count(bug.right)
        if occurrences != 1:
            found.append(f"{bug.name}: {bug.file} has {occurrences} of {bug.right!r}")
        test = ROOT / "tests" / bug.test.split("::")[0]
        if not test.exists():
            found.append(f"{bug.name}: {test} does not exist")
    return found


def copy_repository(folder: Path) -> None:
    """A copy in which sources may be changed; everything else is a link."""
    for entry in ROOT.iterdir():
        if entry.name in COPIED:
            shutil.copytree(entry, folder / entry.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif entry.name not in UNUSED:
            (folder / entry.name).symlink_to(entry)


def run_test(bug: Bug, folder: Path) -> int:
    """The exit code of the bug's test with the bug in place, which is removed again."""
    path = folder / bug.file
    source = path.read_text()
    path.write_text(source.replace(bug.right, bug.wrong))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow"]
    command.append(f"tests/{bug.test}")
    try:
        return subprocess.run(command, cwd=folder, capture_output=True).returncode
    finally:
        path.write_text(source)


def main(words: list[str]) -> int:
    chosen = [bug for bug in BUGS if not words or any(word in bug.name or word in bug.file for word in words)]
    problems = stale(chosen)
    if problems:
        print("\n".join(["the table of bugs is stale:", *problems]))
        return 2
    missed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_repository(folder)
        for bug in chosen:
            begun = time.perf_counter()
            code = run_test(bug, folder)
            missed += code != CAUGHT
            verdict = {CAUGHT: "caught", PASSED: "NOT CAUGHT"}.get(code, f"pytest failed, exit code {code}")
            seconds = time.perf_counter() - begun
            print(f"{verdict:12} {seconds:5.0f} s  {bug.name} ({bug.file}, {bug.test})", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} bugs caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
