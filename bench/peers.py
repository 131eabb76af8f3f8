"""The programs that tinyloop is measured against, each with the same three things to do.

A peer holds the KV of one sequence. `run(tokens, start)` runs the tokens at positions start ..,
over the KV that earlier runs left below `start`, and returns the last one's logits, float32
[vocab_size]. A prefill is a run from 0, a decode step a run of one token; what a pool spares can be
had of a peer only by a caller that keeps its one sequence in place.
"""

import ctypes

import numpy as np
from models import BenchModel

MAX_LENGTH = 2048

try:
    import torch
    import torch.nn.functional as F  # noqa: N812
except ImportError:
    torch = None
try:
    import llama_cpp
except ImportError:
    llama_cpp = None
else:
    _SILENT = llama_cpp.llama_log_callback(lambda _level, _text, _user: None)
    llama_cpp.llama_log_set(_SILENT, None)


def missing() -> list[str]:
    """Names of the peers that are not installed."""
    peers = {"PyTorch": torch, "llama.cpp (llama-cpp-python)": llama_cpp}
    return [name for name, module in peers.items() if module is None]


class TorchPeer:
    """Eager PyTorch: fused projections, static KV, scaled_dot_product_attention."""

    def __init__(self, model: BenchModel, dtype: str):
        self.name = f"torch {dtype}"
        self.config = config = model.config
        self.dtype = getattr(torch, dtype)
        self.embed = self._tensor(model.weights["embed.weight"])
        head = model.weights.get("head.weight")
        self.head = self.embed if head is None else self._tensor(head)
        self.final_norm = self._tensor(model.weights["final_norm.weight"])
        self.stage_norms = [
            self._tensor(model.weights[f"stages.{s}.norm.weight"]) if stage.end_norm else None
            for s, stage in enumerate(config.stages)
        ]
        self.layers = [self._layer(model, n) for n in range(config.n_layers)]
        visits = sum(s.n_layers * (config.loops if s.looped else 1) for s in config.stages)
        shape = (visits, config.n_kv_heads, MAX_LENGTH, config.head_dim)
        self.keys = torch.zeros(shape, dtype=self.dtype)
        self.values = torch.zeros(shape, dtype=self.dtype)
        self.cos, self.sin = self._rotations()

    def set_threads(self, threads: int) -> None:
        """Threads of an operation, process-wide."""
        torch.set_num_threads(threads)

    def run(self, tokens: np.ndarray, start: int) -> np.ndarray:
        """See the module."""
        with torch.inference_mode():
            x = F.embedding(torch.from_numpy(tokens.astype(np.int64)), self.embed)
            x = self._stages(x, start)
            x = self._norm(x[-1:], self.final_norm)
            return F.linear(x, self.head)[0].float().numpy()

    def _tensor(self, array: np.ndarray) -> "torch.Tensor":
        tensor = torch.from_numpy(array)
        if array.dtype == np.uint16:
            tensor = tensor.view(torch.bfloat16)
        return tensor.to(self.dtype)

    def _layer(self, model: BenchModel, n: int) -> dict[str, "torch.Tensor"]:
        def weight(*names: str) -> "torch.Tensor":
            arrays = [model.weights[f"layers.{n}.{name}.weight"] for name in names]
            return self._tensor(np.concatenate(arrays))

        return {
            "attn_norm": weight("attn_norm"),
            "qkv": weight("attn.q", "attn.k", "attn.v"),
            "o": weight("attn.o"),
            "mlp_norm": weight("mlp_norm"),
            "gate_up": weight("mlp.gate", "mlp.up"),
            "down": weight("mlp.down"),
        }

    def _rotations(self) -> tuple["torch.Tensor", "torch.Tensor"]:
        """Cosines, and sines with the sign of the half they are added to: [position, 1, dim]."""
        half = self.config.head_dim // 2
        exponents = torch.arange(half, dtype=torch.float64) / half
        angles = torch.outer(
            torch.arange(MAX_LENGTH, dtype=torch.float64), self.config.rope_theta**-exponents
        )
        cos = torch.cat([angles.cos(), angles.cos()], 1)
        sin = torch.cat([-angles.sin(), angles.sin()], 1)
        return cos[:, None].to(self.dtype), sin[:, None].to(self.dtype)

    def _norm(self, x: "torch.Tensor", weight: "torch.Tensor") -> "torch.Tensor":
        return F.rms_norm(x, weight.shape, weight, self.config.norm_eps)

    def _stages(self, x: "torch.Tensor", start: int) -> "torch.Tensor":
        config, visit = self.config, 0
        for stage, norm in zip(config.stages, self.stage_norms, strict=True):
            entry = x
            if stage.looped and config.state_init == 2:
                x = torch.zeros_like(x)
            for _ in range(config.loops if stage.looped else 1):
                if stage.looped and config.inject:
                    x = x + entry
                for n in range(stage.first_layer, stage.first_layer + stage.n_layers):
                    x = self._attention(x, self.layers[n], visit, start)
                    x = self._mlp(x, self.layers[n])
                    visit += 1
                if norm is not None:
                    x = self._norm(x, norm)
        return x

    def _attention(
        self, x: "torch.Tensor", layer: dict[str, "torch.Tensor"], visit: int, start: int
    ) -> "torch.Tensor":
        config, n = self.config, len(x)
        rotated, end = config.n_heads + config.n_kv_heads, start + len(x)
        heads = F.linear(self._norm(x, layer["attn_norm"]), layer["qkv"])
        heads = heads.view(n, -1, config.head_dim)
        qk, v = heads[:, :rotated], heads[:, rotated:]
        turned = qk.roll(config.head_dim // 2, -1)
        qk = qk * self.cos[start:end] + turned * self.sin[start:end]
        self.keys[visit, :, start:end] = qk[:, config.n_heads :].transpose(0, 1)
        self.values[visit, :, start:end] = v.transpose(0, 1)
        out = self._attend(qk[:, : config.n_heads], visit, start, end)
        return x + F.linear(out, layer["o"])

    def _attend(self, q: "torch.Tensor", visit: int, start: int, end: int) -> "torch.Tensor":
        config, n = self.config, len(q)
        keys, values = self.keys[None, visit, :, :end], self.values[None, visit, :, :end]
        if n == 1:  # a group's query heads are so many queries of its one KV head
            q = q.view(1, config.n_kv_heads, -1, config.head_dim)
            return F.scaled_dot_product_attention(q, keys, values).reshape(1, -1)
        group = config.n_heads // config.n_kv_heads
        if group > 1:
            keys, values = (t.repeat_interleave(group, 1) for t in (keys, values))
        mask = None if start == 0 else torch.ones(n, end, dtype=torch.bool).tril(start)
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None], keys, values, attn_mask=mask, is_causal=start == 0
        )
        return out[0].transpose(0, 1).reshape(n, -1)

    def _mlp(self, x: "torch.Tensor", layer: dict[str, "torch.Tensor"]) -> "torch.Tensor":
        gate, up = F.linear(self._norm(x, layer["mlp_norm"]), layer["gate_up"]).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, layer["down"])


class LlamaPeer:
    """llama.cpp through the low-level API of llama-cpp-python, with its defaults: f16 KV."""

    name = "llama.cpp"

    def __init__(self, model: BenchModel):
        llama_cpp.llama_backend_init()
        options = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(str(model.gguf).encode(), options)
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {model.gguf}")
        context = llama_cpp.llama_context_default_params()
        context.n_ctx = context.n_batch = MAX_LENGTH
        self.context = llama_cpp.llama_init_from_model(self.model, context)
        if not self.context:
            raise RuntimeError(f"llama.cpp cannot make a context for {model.gguf}")
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.vocab_size = model.config.vocab_size

    def set_threads(self, threads: int) -> None:
        """Threads of a run."""
        llama_cpp.llama_set_n_threads(self.context, threads, threads)

    def run(self, tokens: np.ndarray, start: int) -> np.ndarray:
        """See the module."""
        llama_cpp.llama_memory_seq_rm(self.memory, 0, start, -1)
        ids = tokens.astype(np.int32)
        batch = llama_cpp.llama_batch_get_one(
            ids.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_token)), len(ids)
        )
        status = llama_cpp.llama_decode(self.context, batch)
        if status:
            raise RuntimeError(f"llama_decode of {len(ids)} tokens at {start}: status {status}")
        logits = llama_cpp.llama_get_logits_ith(self.context, -1)
        return np.ctypeslib.as_array(logits, (self.vocab_size,)).copy()

    def close(self) -> None:
        """Frees model and context."""
        llama_cpp.llama_free(self.context)
        llama_cpp.llama_model_free(self.model)


Peers = list[TorchPeer | LlamaPeer]


def peers_of(model: BenchModel) -> Peers:
    """All installed peers that can run the model."""
    peers: Peers = []
    if torch is not None:
        peers += [TorchPeer(model, "bfloat16"), TorchPeer(model, "float32")]
    if llama_cpp is not None and model.gguf is not None:
        peers.append(LlamaPeer(model))
    return peers
