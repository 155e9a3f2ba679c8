# SPDX-License-Identifier: Apache-2.0
"""The main job: a model reads a long text and writes on, its KV cache mostly on flash.

tools/quickstart sets everything up and calls it. Two processes:

  1. One forward over the prompt and new tokens with a HiFC cache; the same with transformers'
     DynamicCache, whose logits must be bitwise the same at every step; new tokens with StaticCache,
     the fastest of transformers' own, filled from the DynamicCache. One torch thread; the three
     take turns of a few tokens, so that noise of the machine hits all alike. Stores the prefix.
  2. Another process loads the stored prefix and generates (first token: warm). Then it computes
     the prompt with DynamicCache (first token: cold), cuts that where the loaded prefix ended, and
     generates from there: bitwise the same again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_PROGRESS_BARS="1")

import torch
import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, StaticCache

import hifc
from hifc.stream.plan import RESIDENT_RATIO, KVShape, make_plan

TEXT = "/usr/share/common-licenses/GPL-3"
# Tokens that one cache generates before the next has its turn.
TURN_TOKENS = 8
# Times that all streamed layers are read with nothing to compute, for the median.
READS = 5
NAMES = {"hifc": "HiFC", "dynamic": "DynamicCache", "static": "StaticCache"}


def say(text: str) -> None:
    """For people, on stderr."""
    print(text, file=sys.stderr, flush=True)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tools/quickstart", description="the main job")
    parser.add_argument("--model", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--uri", required=True, help="device of the namespace")
    parser.add_argument("--format", default="if_missing", help="as in the configuration")
    parser.add_argument("--text", type=Path, default=Path(TEXT), help="what the model reads")
    parser.add_argument("--tokens", type=int, default=0, help="of the text; 0: all that fit")
    parser.add_argument("--new", type=int, default=64, help="tokens to generate")
    parser.add_argument(
        "--resident", type=float, default=RESIDENT_RATIO, help="of the KV, in memory"
    )
    parser.add_argument("--slots", type=int, default=2, help="layers that rotate")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--warm", action="store_true", help="the second process")
    return parser.parse_args(arguments)


class Job:
    """Model, prompt and namespace."""

    def __init__(self, options: argparse.Namespace, again: bool = False) -> None:
        self.options = options
        self.again = again  # the namespace is there, with the prefix
        torch.set_num_threads(1)
        torch.manual_seed(0)
        say("loading the model")
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            options.model, dtype=torch.float32
        ).eval()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(options.model)
        self.ids = self._prompt()
        self.new: int = options.new
        # The last token that is generated is never fed back.
        self.max_tokens = self.ids.shape[1] + self.new - 1
        self._open()
        with torch.inference_mode():  # weights come in, memory is found: once, for all alike
            self.model(self.ids[:, :16], cache=self.dynamic())

    def _prompt(self) -> torch.Tensor:
        options = self.options
        if not options.text.is_file():
            raise SystemExit(
                f"{options.text} is missing (Debian's base-files brings the default one): name a "
                "text with --text FILE"
            )
        text = options.text.read_text(encoding="utf-8")
        ids: torch.Tensor = self.tokenizer(text, return_tensors="pt", verbose=False).input_ids
        room = self.model.config.max_position_embeddings - options.new
        wanted = options.tokens or min(ids.shape[1], room)
        if not 2 <= wanted <= min(ids.shape[1], room):
            raise SystemExit(
                f"--tokens {wanted}: the text has {ids.shape[1]} tokens, the model takes {room} "
                f"beside {options.new} new ones"
            )
        return ids[:, :wanted]

    def _open(self) -> None:
        """The reactor gets a CPU of its own where there are two, the model another."""
        cpus = sorted(os.sched_getaffinity(0))
        own = len(cpus) > 1 and not self.options.uri.startswith("spdk")
        if own:
            os.sched_setaffinity(0, {cpus[-1]})
        try:
            self.engine = hifc.HiFC(
                {
                    "device": self.options.uri,
                    "format": "never" if self.again else self.options.format,
                    "pool_size": self._pool_bytes(),
                    "memory_budget": "2MiB",
                    "swap_buffer_size": 0,
                    "resident_ratio": self.options.resident,
                    "staging_layers": self.options.slots,
                    "owner_socket": False,
                }
            )
        finally:
            # Threads inherit where they may run, so only the reactor stays where it is.
            if len(cpus) > 1:
                os.sched_setaffinity(0, {cpus[0]})

    def _pool_bytes(self) -> int:
        """Room for what the plan takes; what is taken of it is measured, not this."""
        config = self.model.config
        shape = KVShape(
            config.num_hidden_layers, config.num_key_value_heads, config.head_dim, item_bytes=4
        )
        plan = make_plan(shape, self.max_tokens, self.options.resident, slots=self.options.slots)
        return plan.resident_bytes * 16 // 15 + (2 << 20)

    def hifc(self) -> Any:
        return self.engine.cache(self.model.config, self.max_tokens)

    def dynamic(self) -> DynamicCache:
        return DynamicCache(config=self.model.config)

    def static(self, filled: DynamicCache) -> StaticCache:
        """A StaticCache that holds what a DynamicCache holds."""
        cache = StaticCache(config=self.model.config, max_cache_len=self.max_tokens + 1)
        for index, layer in enumerate(filled.layers):
            cache.update(layer.keys, layer.values, index)
        return cache

    def prefill(self, cache: Any, name: str, ids: torch.Tensor) -> torch.Tensor:
        """One forward with a bar that counts layers; the last token's logits, [1, vocabulary]."""
        layers = self.model.model.layers
        with tqdm.tqdm(
            total=len(layers),
            desc=f"{ids.shape[1]} tokens, {name}",
            unit="layer",
            file=sys.stderr,
            leave=False,
            disable=None,  # where there is no terminal
        ) as bar:

            def tick(*_: object) -> None:
                bar.update()

            hooks = [layer.register_forward_hook(tick) for layer in layers]
            try:
                output = self.model(ids, cache=cache, logits_to_keep=1)
            finally:
                for hook in hooks:
                    hook.remove()
        return output.logits[:, -1]

    def step(self, cache: Any, token: torch.Tensor) -> torch.Tensor:
        """One more token; logits [1, vocabulary]."""
        return self.model(token, cache=cache, logits_to_keep=1).logits[:, -1]


class Run:
    """Generation with one cache, token by token."""

    def __init__(self, job: Job, cache: Any, logits: torch.Tensor) -> None:
        self.job = job
        self.cache = cache
        self.logits = [logits]
        self.tokens = [int(logits.argmax())]
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []  # of this thread

    def turn(self, count: int) -> None:
        """Generates count tokens, each timed."""
        for _ in range(count):
            started, cpu_started = time.perf_counter(), time.thread_time()
            token = torch.tensor([[self.tokens[-1]]])
            logits = self.job.step(self.cache, token)
            self.tokens.append(int(logits.argmax()))
            self.seconds.append(time.perf_counter() - started)
            self.cpu_seconds.append(time.thread_time() - cpu_started)
            self.logits.append(logits)

    def p(self, share: float) -> float:
        """Milliseconds of a token, by share of the tokens."""
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e3

    def tokens_per_s(self) -> float:
        """By the median token."""
        return 1.0 / statistics.median(self.seconds)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def first_process(job: Job) -> tuple[dict[str, Any], dict[str, Run], str]:
    """Exactness, memory and speed; stores the prefix."""
    cache, dynamic = job.hifc(), job.dynamic()
    say(cache.plan.describe())
    runs: dict[str, Run] = {}
    logits_identical = True
    with torch.inference_mode():
        for name, one in (("hifc", cache), ("dynamic", dynamic)):
            runs[name] = Run(job, one, job.prefill(one, NAMES[name], job.ids))
        runs["static"] = Run(job, job.static(dynamic), runs["dynamic"].logits[0])
        left = job.new - 1
        with tqdm.tqdm(
            total=left, desc="new tokens", unit="token", file=sys.stderr, leave=False, disable=None
        ) as bar:
            while left:
                count = min(left, TURN_TOKENS)
                for run in runs.values():
                    run.turn(count)
                left -= count
                bar.update(count)
                pairs = zip(runs["hifc"].logits, runs["dynamic"].logits, strict=True)
                logits_identical &= all(same_bits(*pair) for pair in pairs)
                for run in runs.values():
                    run.logits.clear()
    counters = cache.counters
    stats = job.engine.namespace.stats()
    reads_s = statistics.median(cache.read_all() for _ in range(READS))
    result = {
        "tokens_identical": runs["hifc"].tokens == runs["dynamic"].tokens,
        "logits_identical": logits_identical,
        "resident_kv_bytes": cache.resident_peak_bytes,
        "total_kv_bytes": cache.total_kv_bytes,
        "bytes_written": stats.device_write_bytes,
        "bytes_read": stats.device_read_bytes,
        "prefetch_hit": counters["prefetch_hit"],
        "total_access": counters["total_access"],
        "waited_ms": counters["wait_ns"] * 1e-6 / max(1, len(runs["hifc"].seconds)),
        "reads_ms": reads_s * 1e3,
        "reads_bytes": len(cache.plan.streamed)
        * cache.plan.share_bytes
        * (cache.get_seq_length() // cache.plan.block_tokens),
    }
    say("storing the prefix")
    started = time.perf_counter()
    result["saved_tokens"] = cache.save_prefix(job.ids)
    result["save_s"] = time.perf_counter() - started
    cache.close()
    return result, runs, job.tokenizer.decode(runs["hifc"].tokens)


class FirstToken:
    """A streamer that tells when the first new token came; the prompt comes before it."""

    def __init__(self) -> None:
        self.calls = 0
        self.at = 0.0

    def put(self, _value: torch.Tensor) -> None:
        self.calls += 1
        if self.calls == 2:
            self.at = time.perf_counter()

    def end(self) -> None:
        """Nothing."""


def generate(job: Job, cache: Any) -> tuple[list[int], torch.Tensor, float]:
    """What a user calls. Returns new tokens, their logits, the time of the first."""
    first = FirstToken()
    output = job.model.generate(
        job.ids,
        cache=cache,  # past_key_values=cache is the older name
        max_new_tokens=job.new,
        min_new_tokens=job.new,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        streamer=first,
        pad_token_id=job.model.config.eos_token_id,
    )
    tokens = output.sequences[0, job.ids.shape[1] :].tolist()
    return tokens, torch.stack(output.logits), first.at


def second_process(job: Job) -> dict[str, Any]:
    """The same prompt from the stored prefix, and computed."""
    say("the same prompt from the stored prefix")
    cache = job.hifc()
    started = time.perf_counter()
    loaded = cache.load_prefix(job.ids)
    load_s = time.perf_counter() - started
    tokens, logits, first = generate(job, cache)
    warm_s = first - started
    cache.close()
    if loaded < job.ids.shape[1] - 1:  # all but the token whose logits are wanted
        raise SystemExit(
            f"only {loaded} of the {job.ids.shape[1]} stored tokens were found again: the device "
            "must have room for the prefix, and nothing else may write to it meanwhile"
        )
    reference = job.dynamic()
    started = time.perf_counter()
    with torch.inference_mode():
        job.prefill(reference, "computed", job.ids)
    cold_s = time.perf_counter() - started
    # The stored prefix was computed in one forward over the prompt: so is this, then it is cut.
    reference.crop(loaded - job.ids.shape[1])
    wanted, wanted_logits, _ = generate(job, reference)
    return {
        "tokens_identical": tokens == wanted,
        "logits_identical": same_bits(logits, wanted_logits),
        "loaded_tokens": loaded,
        "load_s": load_s,
        "ttft_warm_s": warm_s,
        "ttft_cold_s": cold_s,
    }


def run_second_process(job: Job) -> dict[str, Any]:
    """Of its own, but for a device that dies with this one."""
    uri = job.options.uri
    job.engine.close()
    if uri.startswith("ram:"):
        return second_process(Job(job.options, again=True))
    command = [sys.executable, "-P", __file__, *sys.argv[1:], "--warm"]
    child = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if child.returncode != 0:
        raise SystemExit(f"the second process failed with exit status {child.returncode}")
    found: dict[str, Any] = json.loads(child.stdout)
    return found


def table(result: dict[str, Any], first: dict[str, Any], warm: dict[str, Any], job: Job) -> str:
    """For people."""
    mib = 1 << 20
    rows = [
        ("device", result["device"]),
        ("prompt and new tokens", f"{job.ids.shape[1]} + {job.new}"),
        (
            "logits and tokens identical",
            f"{first['exact']}, from the stored prefix {warm['exact']}",
        ),
        (
            "KV resident at its peak",
            f"{result['resident_kv_bytes'] / mib:.1f} of {result['total_kv_bytes'] / mib:.1f} MiB "
            f"({result['resident_kv_bytes'] / result['total_kv_bytes']:.4f})",
        ),
        (
            "KV written to, read from the device",
            f"{result['bytes_written'] / mib:.0f} MiB, {result['bytes_read'] / mib:.0f} MiB",
        ),
        (
            "layers there when attention asked",
            f"{result['prefetch_hit']} of {result['total_access']}",
        ),
        (
            "of a token, waiting for the device",
            f"{first['waited_ms']:.1f} ms; its reads alone {first['reads_ms']:.1f} ms "
            f"({first['reads_bytes'] / first['reads_ms'] / 1e6:.2f} GB/s)",
        ),
        (
            "first token, computed",
            f"{result['ttft_cold_s']:.2f} s",
        ),
        (
            f"first token, {warm['loaded_tokens']} tokens loaded",
            f"{result['ttft_warm_s']:.2f} s ({result['ttft_cold_s'] / result['ttft_warm_s']:.0f} x "
            "faster)",
        ),
    ]
    width = max(len(name) for name, _ in rows) + 2
    lines = [f"{name:<{width}}{value}" for name, value in rows]
    lines += ["", f"{'':<{width}}{'tokens/s':>9}{'p50 ms':>9}{'p99 ms':>9}{'CPU ms':>9}"]
    for name, (rate, *times) in first["speeds"].items():
        columns = "".join(f"{time_ms:>9.1f}" for time_ms in times)
        lines.append(f"{NAMES[name]:<{width}}{rate:>9.2f}{columns}")
    ratio = first["speeds"]["hifc"][0] / first["speeds"]["static"][0]
    lines.append(
        f"HiFC reaches {ratio:.2f} of StaticCache's tokens/s (medians, one torch "
        "thread; CPU: of that thread)"
    )
    return "\n".join(lines)


def main() -> int:
    options = parse()
    job = Job(options, again=options.warm)
    if options.warm:
        print(json.dumps(second_process(job)))
        job.engine.close()
        return 0
    first, runs, text = first_process(job)
    warm = run_second_process(job)
    exact = all(one[f"{kind}_identical"] for one in (first, warm) for kind in ("tokens", "logits"))
    result = {
        "tokens_identical": exact,
        "resident_kv_bytes": first["resident_kv_bytes"],
        "total_kv_bytes": first["total_kv_bytes"],
        "tokens_per_s": round(runs["hifc"].tokens_per_s(), 3),
        "tokens_per_s_in_memory": round(runs["static"].tokens_per_s(), 3),
        "p99_ms": round(runs["hifc"].p(0.99), 2),
        "p99_ms_in_memory": round(runs["static"].p(0.99), 2),
        "bytes_written": first["bytes_written"],
        "bytes_read": first["bytes_read"],
        "prefetch_hit": first["prefetch_hit"],
        "total_access": first["total_access"],
        "ttft_cold_s": round(warm["ttft_cold_s"], 3),
        "ttft_warm_s": round(warm["ttft_warm_s"], 3),
        "device": options.uri,
    }
    for one in (first, warm):
        one["exact"] = "yes" if one["tokens_identical"] and one["logits_identical"] else "NO"
    first["speeds"] = {
        name: (
            run.tokens_per_s(),
            run.p(0.5),
            run.p(0.99),
            statistics.median(run.cpu_seconds) * 1e3,
        )
        for name, run in runs.items()
    }
    say(f"it wrote: {text!r}\n")
    say(table(result, first, warm, job)) if options.json else print(table(result, first, warm, job))
    if options.json:
        print(json.dumps(result))
    return 0 if exact else 1


if __name__ == "__main__":
    sys.exit(main())
