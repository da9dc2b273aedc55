"""One vLLM engine, driven step by step: token ids in; ids, logprobs and the policy version of every token out.

Wraps `LLMEngine.add_request` and `step` and keeps what vLLM does not know: which policy version it holds, which
version sampled which token of a request in flight, and the KV-cache salt of each version, so that no KV block of an
older version is ever reused by a new rollout.

It refuses to know about groups, ticks and other ranks; on a follower of a tensor-parallel replica the same calls in the
same order keep the scheduler in step, and the results are thrown away.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from spmd_rl.inference.build import model_runner
from spmd_rl.inference.noise import SEED_KEY
from spmd_rl.inference.swap import checked, swap_weights
from spmd_rl.models.hf_folder import tensor_shapes
from spmd_rl.world.messages import Generate, Generated, Probed, Refused

PRIORITY_ROLLOUT, PRIORITY_PROBE = 0, -1  # lower goes first: a probe must not wait behind queued rollouts


@dataclass
class _Request:
    """A request in flight."""

    id: int
    handle: str  # vLLM's own id
    salt: str
    spans: list[tuple[int, int]]  # (number of tokens generated before, version that generates from there on)


@dataclass
class _Probe:
    """The probe set in flight."""

    version: int
    handles: dict[str, int]
    logprobs: list[np.ndarray | None] = field(default_factory=list)


class Engine:
    """The engine of one rank.

    Args:
        llm: a `LLMEngine` from `build.build_engine`.
        version: policy version of the weights it was built with; -1 = of no version yet.
        rank: stamped into probe results.
    """

    def __init__(self, llm: Any, rank: int, version: int = -1) -> None:
        self._llm, self._rank, self.version = llm, rank, version
        self._scheduler = llm.engine_core.engine_core.scheduler
        self._runner = model_runner(llm)
        self._shapes = tensor_shapes(llm.model_config.model)
        self._live: dict[str, _Request] = {}
        self._handles: dict[int, str] = {}
        self._probe: _Probe | None = None
        self._arrivals = 0
        self.steps, self.step_s, self.tokens = 0, 0.0, 0

    @property
    def busy(self) -> bool:
        """True while a step would do something."""
        return self._llm.has_unfinished_requests()

    @property
    def probing(self) -> bool:
        """True while the probe set is being scored; a swap waits for it."""
        return self._probe is not None

    def add(self, request: Generate) -> Refused | None:
        """Queue a request; `Refused` says why the engine will not take it."""
        from vllm import SamplingParams
        from vllm.exceptions import VLLMClientError  # no ValueError: vLLM has its own hierarchy
        from vllm.sampling_params import RequestOutputKind

        salt = request.salt or f"v{self.version}"
        try:
            self._check_vocabulary(request.tokens)
            params = SamplingParams(
                temperature=request.temperature,
                max_tokens=request.max_tokens,
                top_p=request.top_p,
                top_k=request.top_k,
                stop_token_ids=request.stop_token_ids,
                ignore_eos=True,  # only the request's own stop tokens end it
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
                extra_args={SEED_KEY: request.seed},
            )
            handle = self._submit(f"g{request.id}", request.tokens, salt, params, PRIORITY_ROLLOUT)
        except (VLLMClientError, ValueError, TypeError) as error:
            return Refused(request.id, f"{type(error).__name__}: {error}")
        self._live[f"g{request.id}"] = _Request(request.id, handle, salt, [(0, self.version)])
        self._handles[request.id] = handle
        return None

    def cancel(self, id: int) -> Generated | None:
        """Forget a request; None if it is not in flight (any more)."""
        handle = self._handles.pop(id, None)
        if handle is None:
            return None
        self._llm.abort_request([handle], internal=True)
        request = self._live.pop(f"g{id}")
        empty = np.zeros(0)
        return Generated(
            id, empty.astype(np.int32), empty.astype(np.float32), empty.astype(np.int32), "aborted", request.salt
        )

    def probe(self, sequences: list[np.ndarray]) -> None:
        """Score sequences with the current weights; `step` returns a `Probed` when all are done."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            prompt_logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._probe = _Probe(self.version, {}, [None] * len(sequences))
        for i, tokens in enumerate(sequences):
            self._submit(f"p{i}", tokens, f"probe{self.version}", params, PRIORITY_PROBE)
            self._probe.handles[f"p{i}"] = i

    def swap(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]], names: list[str]) -> None:
        """Replace the weights between two steps; requests in flight go on with them on their old KV cache.

        WeightsError when `tensors` are not exactly `names`, have other shapes than the model folder's, or do not cover
        the engine's model.
        """
        swap_weights(self._runner, checked(tensors, names, self._shapes))
        self.version = version
        for request in self._live.values():
            done = self._scheduler.requests[request.handle].num_output_tokens
            if request.spans[-1][0] == done:
                request.spans[-1] = (done, version)  # the version between generated nothing of this request
            else:
                request.spans.append((done, version))

    def step(self) -> list[Generated | Probed]:
        """One engine step; what it finished."""
        started = time.perf_counter()
        outputs = self._llm.step()
        self.steps += 1
        self.step_s += time.perf_counter() - started
        events: list[Generated | Probed] = []
        for output in outputs:
            if output.request_id in self._live:
                events.append(self._generated(output))
            elif self._probe is not None and output.request_id in self._probe.handles:
                events += self._probed(output)
        return events

    def _check_vocabulary(self, tokens: np.ndarray) -> None:
        """vLLM checks ids only where it has a tokenizer; a wrong one would end the whole engine."""
        size = self._llm.model_config.get_vocab_size()
        wrong = tokens[(tokens < 0) | (tokens >= size)]
        if len(wrong):
            raise ValueError(f"token ids {wrong[:5].tolist()} are outside the model's vocabulary of {size}")

    def _submit(self, name: str, tokens: np.ndarray, salt: str, params: Any, priority: int) -> str:
        self._arrivals += 1  # a counter, not the time, orders requests: ranks of a replica must agree
        prompt = {"prompt_token_ids": tokens.tolist(), "cache_salt": salt}
        return self._llm.add_request(name, prompt, params, arrival_time=float(self._arrivals), priority=priority)

    def _generated(self, output: Any) -> Generated:
        request = self._live.pop(output.request_id)
        del self._handles[request.id]
        completion = output.outputs[0]
        tokens = np.asarray(completion.token_ids, dtype=np.int32)
        logprobs = np.asarray(completion.logprobs.logprobs, dtype=np.float32)
        starts = [start for start, _ in request.spans] + [len(tokens)]
        versions = np.repeat([version for _, version in request.spans], np.diff(starts)).astype(np.int32)
        self.tokens += len(tokens)
        return Generated(request.id, tokens, logprobs, versions, completion.finish_reason, request.salt)

    def _probed(self, output: Any) -> list[Probed]:
        probe = self._probe
        scores = output.prompt_logprobs
        firsts = [scores.start_indices[t] for t in range(1, len(scores))]  # position 0 has no logprob
        probe.logprobs[probe.handles.pop(output.request_id)] = np.asarray(scores.logprobs, dtype=np.float32)[firsts]
        if probe.handles:
            return []
        self._probe = None
        return [Probed(self._rank, probe.version, probe.logprobs)]
