"""One vLLM engine, driven step by step: token ids in; ids, logprobs and the policy version of every token out.

Wraps `LLMEngine.add_request` and `step` and keeps what vLLM does not know: which policy version it holds, which
version sampled which token of a request in flight, and the KV-cache salt of each version, so that no KV block of an
older version is ever reused by a new rollout.

It refuses to know about groups, ticks and other ranks; on a follower of a tensor-parallel replica the same calls in the
same order keep the scheduler in step, and the results are thrown away.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from spmd_rl.inference.build import model_runner
from spmd_rl.inference.memory import EngineMemory
from spmd_rl.inference.noise import SEED_KEY
from spmd_rl.inference.swap import checked, swap_weights
from spmd_rl.models.hf_folder import tensor_shapes
from spmd_rl.world.messages import Generate, Generated, Partial, Probed, Refused

PRIORITY_ROLLOUT, PRIORITY_PROBE = 0, -1  # lower goes first: a probe must not wait behind queued rollouts


@dataclass
class _Request:
    """A request in flight."""

    asked: Generate
    handle: str  # vLLM's own id
    begun: Partial  # what it had generated when vLLM was last given it
    spans: list[
        tuple[int, int]
    ]  # since then: (number of tokens generated before, version that generates from there on)


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
        keep: called with id, first position and routed experts [positions, layers, top_k] of each request that asked
            for them to be kept; None where the engine does not know any, or is a follower.
    """

    def __init__(
        self, llm: Any, rank: int, version: int = -1, keep: Callable[[int, int, np.ndarray], None] | None = None
    ) -> None:
        self._llm, self._rank, self.version, self._keep = llm, rank, version, keep
        self._scheduler = llm.engine_core.engine_core.scheduler
        self._runner = model_runner(llm)
        self._shapes = tensor_shapes(llm.model_config.model)
        self._live: dict[str, _Request] = {}
        self._probe: _Probe | None = None
        self._arrivals = 0
        self._memory, self._asleep = EngineMemory(llm), False
        self._held: list[tuple[Generate, Partial | None]] = []  # asked, and what was generated, while it sleeps
        self.steps, self.step_s, self.tokens = 0, 0.0, 0

    @property
    def busy(self) -> bool:
        """True while a step would do something."""
        return self._llm.has_unfinished_requests()

    @property
    def prefills(self) -> bool:
        """True while the next step takes in tokens of a prompt. Requests that wait for a free slot do not count."""
        scheduler = self._scheduler
        waiting = scheduler.waiting or scheduler.skipped_waiting
        if waiting and len(scheduler.running) < scheduler.max_num_running_reqs:
            return True
        return any(request.num_computed_tokens < request.num_prompt_tokens for request in scheduler.running)

    @property
    def probing(self) -> bool:
        """True while the probe set is being scored; a swap waits for it."""
        return self._probe is not None

    def add(self, request: Generate) -> Refused | None:
        """Queue a request; `Refused` says why the engine will not take it."""
        from vllm.exceptions import VLLMClientError  # no ValueError: vLLM has its own hierarchy

        try:
            self._check_vocabulary(request.tokens)
            if self._asleep:
                self._held.append((request, request.begun))
            else:
                self._begin(request, request.begun)
        except (VLLMClientError, ValueError, TypeError) as error:
            return Refused(request.id, f"{type(error).__name__}: {error}")
        return None

    def restart(self) -> list[Partial]:
        """Begin all requests in flight anew behind their tokens, on empty caches; what they had, in order of admission.

        After it, what an engine does depends on its weights and these requests alone, not on how it came here: KV of
        older versions and the prefix cache are gone. An engine that is given the same in `Generate.begun` goes on
        bit for bit alike.
        """
        if self._asleep:  # there is no KV, and all requests wait already
            return [begun for _, begun in self._held if begun is not None]
        held = self._take_out()
        for asked, partial in held:
            self._begin(asked, partial)
        return [partial for _, partial in held]

    def sleep(self) -> None:
        """Give its memory back; the next `swap` wakes it. Requests in flight, and those that come, wait until then.

        They begin anew behind their tokens, with the new weights.
        """
        if not self._asleep:
            self._held = list(self._take_out())
            self._memory.release()
            self._asleep = True

    def _take_out(self) -> list[tuple[Generate, Partial]]:
        """Empty vLLM of requests and of KV; what was asked and what there is of it, in order of admission."""
        live = list(self._live.values())
        held = [(request.asked, self._partial(request)) for request in live]
        self._llm.abort_request([request.handle for request in live], internal=True)
        self._live.clear()
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("the engine's KV cache could not be reset: something still holds blocks of it")
        return held

    def _wake(self) -> None:
        self._memory.take_cache()
        self._asleep, held, self._held = False, self._held, []
        for asked, begun in held:
            self._begin(asked, begun)

    def cancel(self, id: int) -> Generated | None:
        """Forget a request; None if it is not in flight (any more)."""
        request = self._live.pop(f"g{id}", None)
        held = [entry for entry in self._held if entry[0].id == id]
        if request is None and not held:
            return None
        if request is not None:
            self._llm.abort_request([request.handle], internal=True)
        self._held = [entry for entry in self._held if entry[0].id != id]
        empty = _nothing(id, request.begun.salt if request is not None else "")
        return Generated(id, empty.tokens, empty.logprobs, empty.versions, "aborted", empty.salt)

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

        An engine that sleeps wakes up.

        WeightsError when `tensors` are not exactly `names`, have other shapes than the model folder's, or do not cover
        the engine's model.
        """
        if self._asleep:
            self._memory.take_weights()
        swap_weights(self._runner, checked(tensors, names, self._shapes))
        self.version = version
        if self._asleep:
            self._wake()
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

    def _begin(self, asked: Generate, begun: Partial | None) -> None:
        """Give vLLM a request: what was generated already stands in its prompt."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        begun = begun or _nothing(asked.id, asked.salt or f"v{self.version}")
        params = SamplingParams(
            temperature=asked.temperature,
            max_tokens=asked.max_tokens - len(begun.tokens),
            top_p=asked.top_p,
            top_k=asked.top_k,
            stop_token_ids=asked.stop_token_ids,
            ignore_eos=True,  # only the request's own stop tokens end it
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={SEED_KEY: asked.seed},
            routed_experts_prompt_start=max(0, asked.routes_from),
        )
        name, tokens = f"g{asked.id}", np.concatenate([asked.tokens, begun.tokens])
        handle = self._submit(name, tokens, begun.salt, params, PRIORITY_ROLLOUT)
        self._live[name] = _Request(asked, handle, begun, [(0, self.version)])

    def _partial(self, request: _Request) -> Partial:
        """What a request in flight has; vLLM itself shows nothing of it before the end (FINAL_ONLY)."""
        state = self._llm.output_processor.request_states[request.handle]
        return self._joined(request, state.detokenizer.output_token_ids, state.logprobs_processor.logprobs.logprobs)

    def _joined(self, request: _Request, new_tokens: list[int], new_logprobs: list[float]) -> Partial:
        """Everything that was generated for a request, before and since it was last begun."""
        begun = request.begun
        starts = [start for start, _ in request.spans] + [len(new_tokens)]
        versions = np.repeat([version for _, version in request.spans], np.diff(starts))
        return Partial(
            begun.id,
            np.concatenate([begun.tokens, np.asarray(new_tokens, dtype=np.int32)]),
            np.concatenate([begun.logprobs, np.asarray(new_logprobs, dtype=np.float32)]),
            np.concatenate([begun.versions, versions.astype(np.int32)]),
            begun.salt,
        )

    def _generated(self, output: Any) -> Generated:
        request, completion = self._live.pop(output.request_id), output.outputs[0]
        whole = self._joined(request, completion.token_ids, completion.logprobs.logprobs)
        self.tokens += len(completion.token_ids)
        if self._keep is not None and request.asked.routes_from >= 0:
            self._keep(whole.id, request.asked.routes_from, self._routed(request, whole, completion.routed_experts))
        return Generated(whole.id, whole.tokens, whole.logprobs, whole.versions, completion.finish_reason, whole.salt)

    def _routed(self, request: _Request, whole: Partial, experts: np.ndarray | None) -> np.ndarray:
        """What vLLM says about the routed experts of a request, which must speak of every token but the last one."""
        count = len(request.asked.tokens) + len(whole.tokens) - 1 - request.asked.routes_from
        if experts is None or len(experts) != count:
            found = "none" if experts is None else f"those of {len(experts)}"
            raise RuntimeError(f"request {whole.id} needs the routed experts of {count} tokens, vLLM returned {found}")
        return experts

    def _probed(self, output: Any) -> list[Probed]:
        probe = self._probe
        scores = output.prompt_logprobs
        firsts = [scores.start_indices[t] for t in range(1, len(scores))]  # position 0 has no logprob
        probe.logprobs[probe.handles.pop(output.request_id)] = np.asarray(scores.logprobs, dtype=np.float32)[firsts]
        if probe.handles:
            return []
        self._probe = None
        return [Probed(self._rank, probe.version, probe.logprobs)]


def _nothing(id: int, salt: str) -> Partial:
    """Nothing generated yet."""
    return Partial(id, np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), salt)
