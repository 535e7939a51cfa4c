"""Generation with vLLM, on GPU or CPU (extras vllm, vllm-cpu), inside this process.

Every completion is a vLLM request of its own with a seed of its own, so its noise does not depend on its
neighbours; its logits do, in their last bits, because vLLM batches as requests come. New weights go the way
that vLLM offers: a folder of safetensors and `reload_weights`. Hidden states cannot be captured or edited.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

# In this process: a worker that is killed leaves no engine behind.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import numpy as np
import torch
import transformers
import vllm

from envs.errors import UserError
from rollouts.engine import check_fit, check_prompt
from rollouts.engine_transformers import end_tokens
from rollouts.samples import Request, Sample, Version, sample_id
from rollouts.weights import PackedWeights, WeightsError, lora_delta


class VllmEngine:
    """See the module.

    `gpu_memory_utilization` is for GPUs, `kv_cache_gb` for CPUs; further options are those of `vllm.LLM`.
    """

    batches_callers = True

    def __init__(
        self,
        model_path: str,
        *,
        dtype: str = "float32",
        deterministic: bool = False,
        max_model_len: int | None = None,
        gpu_memory_utilization: float = 0.5,
        kv_cache_gb: int = 1,
        enforce_eager: bool = True,
        trust_remote_code: bool = False,
        **options: Any,
    ) -> None:
        if deterministic:
            raise UserError(
                "vLLM batches requests as they come, so its samples are not the same bit for bit",
                given="rollout.engine=vllm with run.deterministic=true",
                fix="run.deterministic=false, or rollout.engine=transformers",
            )
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(kv_cache_gb))
        memory = {"gpu_memory_utilization": gpu_memory_utilization} if torch.cuda.is_available() else {}
        self.llm = vllm.LLM(
            model=model_path,
            skip_tokenizer_init=True,
            dtype=dtype,
            max_model_len=max_model_len,
            enforce_eager=enforce_eager,
            trust_remote_code=trust_remote_code,
            logprobs_mode="processed_logprobs",
            max_logprobs=-1,
            seed=0,
            disable_log_stats=True,
            **memory,
            **options,
        )
        self.version: Version = (0, 0)
        self.model_path, self._dtype, self._remote = model_path, getattr(torch, dtype), trust_remote_code
        config = transformers.AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
        with torch.device("meta"):  # names and shapes only
            self._skeleton: Any = transformers.AutoModelForCausalLM.from_config(
                config, dtype=self._dtype, trust_remote_code=trust_remote_code
            )
        every = {name for name, _ in self._skeleton.named_parameters(remove_duplicate=False)}
        tied = every - {name for name, _ in self._skeleton.named_parameters()}
        self._required = set(self._skeleton.state_dict()) - tied
        generation = transformers.GenerationConfig.from_pretrained(model_path)
        self._skeleton.generation_config = generation
        self.eos_ids = end_tokens(self._skeleton)
        self.window = self.llm.llm_engine.model_config.max_model_len
        self.vocabulary = self._skeleton.get_input_embeddings().num_embeddings

    # --- weights

    def load_weights(self, packed: PackedWeights) -> None:
        """Written to a folder as the model's own library writes them, then loaded by vLLM.

        kind "lora": adapters are added to the weights of the model's folder, in float32. Raises WeightsError
        when names or shapes are not the model's; then nothing changed.
        """
        own = self._skeleton.state_dict()
        tensors = packed.tensors()
        if packed.kind == "lora":
            delta = lora_delta(tensors, packed.meta["scaling"])
            check_fit(delta, own)
            tensors = self._base()
            for name, change in delta.items():
                tensors[name] = (tensors[name].float() + change).to(tensors[name].dtype)
        else:
            check_fit(tensors, own)
            missing = sorted(self._required - tensors.keys())
            if missing:
                raise WeightsError(f"weights {packed.version} lack '{missing[0]}'")
        with tempfile.TemporaryDirectory(prefix="weights-") as folder:
            self._skeleton.save_pretrained(folder, state_dict=tensors)
            self.llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
        self.llm.reset_prefix_cache()
        self.version = packed.version

    # --- generation

    def generate(self, requests: list[Request]) -> list[list[Sample]]:
        """See `Engine.generate`. Raises UserError for a prompt that does not fit, or a capture or an edit."""
        for request in requests:
            self._check(request)
        prompts = [
            vllm.TokensPrompt(prompt_token_ids=request.prompt_ids)
            for request in requests
            for _ in range(request.n)
        ]
        params = [self._params(request, index) for request in requests for index in range(request.n)]
        found = iter(self.llm.generate(prompts, params, use_tqdm=False))
        return [
            [self._sample(request, index, next(found).outputs[0]) for index in range(request.n)]
            for request in requests
        ]

    def _check(self, request: Request) -> None:
        request.check()
        if request.capture or request.edit:
            raise UserError(
                "vLLM neither shows nor changes hidden states",
                given="a request with capture or edit",
                fix="rollout.engine=transformers",
            )
        check_prompt(request, self.window, self.vocabulary)

    def _params(self, request: Request, index: int) -> Any:
        p = request.params
        return vllm.SamplingParams(
            n=1,
            temperature=p.temperature,
            top_p=p.top_p,
            top_k=p.top_k,
            max_tokens=p.max_new_tokens,
            seed=int(request.generator(index).integers(2**62)),
            logprobs=request.top_logprobs,
            stop_token_ids=sorted({*p.stop_ids, *self.eos_ids}),
            detokenize=False,
        )

    def _sample(self, request: Request, index: int, output: Any) -> Sample:
        tokens = list(output.token_ids)
        logp = [step[token].logprob for step, token in zip(output.logprobs, tokens)]
        streams: dict[str, np.ndarray] = {}
        if request.top_logprobs:
            best = [_best(step, request.top_logprobs) for step in output.logprobs]
            streams = {
                "top_ids": np.array([[i for i, _ in step] for step in best], np.int64),
                "top_logprobs": np.array([[x for _, x in step] for step in best], np.float32),
            }
        greedy = request.params.temperature == 0
        return Sample(
            id=sample_id(request, index),
            group=request.group,
            index=index,
            prompt_ids=list(request.prompt_ids),
            completion_ids=tokens,
            finish=self._finish(request, tokens),
            logp_rollout=np.zeros(len(tokens), np.float32) if greedy else np.array(logp, np.float32),
            version=self.version,
            streams=streams,
            meta=dict(request.meta),
        )

    def _finish(self, request: Request, tokens: list[int]) -> str:
        if tokens[-1] in self.eos_ids:
            return "eos"
        return "stop" if tokens[-1] in request.params.stop_ids else "length"

    def _base(self) -> dict[str, torch.Tensor]:
        """The weights of the model's folder, under the names that a learner uses."""
        base: Any = transformers.AutoModelForCausalLM.from_pretrained(
            self.model_path, dtype=self._dtype, trust_remote_code=self._remote
        )
        return {name: tensor for name, tensor in base.state_dict().items() if name in self._required}


def _best(step: dict[int, Any], count: int) -> list[tuple[int, float]]:
    """The `count` likeliest tokens; vLLM's dict also holds the one that was drawn."""
    ordered = sorted(((i, entry.logprob) for i, entry in step.items()), key=lambda pair: -pair[1])
    return ordered[:count]
