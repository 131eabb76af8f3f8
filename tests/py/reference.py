"""An independent float64 model of everything that docs/format.md says can be run.

It reads the whole sequence at once, without caches: what a position sees is an explicit mask.
Tensors go by their .tinyloop names; of the optional ones (biases, norm weights, value embeddings)
those count that are there, as a file never has one that its configuration does not call for.
"""

import math
from typing import NamedTuple

import numpy as np

from tinyloop_py.format import read_file
from tinyloop_py.rounding import convert_dtype


class Output(NamedTuple):
    logits: np.ndarray  # [T, vocab]
    states: np.ndarray  # [runs of the looped stages (none: of the last), T, hidden], normed
    exit_logits: np.ndarray  # [loops, T], or [0] without an exit


def load(path):
    """A file's config and its tensors as float64, int8 weights times their scales."""
    file, tensors = read_file(path), {}
    for name, tensor in file.tensors.items():
        values = file.array(name)
        if tensor.dtype == "bfloat16":
            values = convert_dtype(values, "bfloat16", "float32")
        tensors[name] = values.astype(np.float64)
    for name in [name for name in tensors if name.endswith(".scale")]:
        weight, scales = tensors[name.removesuffix("scale") + "weight"], tensors.pop(name)
        if scales.shape[1] > 1:  # one for each group of 128 columns
            scales = np.repeat(scales, 128, axis=1)[:, : weight.shape[1]]
        weight *= scales
    return file.config, tensors


def philox(counter, key):
    """Philox4x32-10 of counters uint32 [4, ...] under a 64-bit key."""
    low32, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    c0, c1, c2, c3 = np.array(counter, np.uint64)
    for turn in range(10):
        key0 = np.uint64(((key & 0xFFFFFFFF) + turn * 0x9E3779B9) & 0xFFFFFFFF)
        key1 = np.uint64(((key >> 32) + turn * 0xBB67AE85) & 0xFFFFFFFF)
        product0, product2 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c2 = product2 >> shift ^ c1 ^ key0, product0 >> shift ^ c3 ^ key1
        c1, c3 = product2 & low32, product0 & low32
    return np.stack([c0, c1, c2, c3])


def normal_noise(seed, cut, n_positions, width):
    """Standard normal numbers [n_positions, width], redrawn until all are within +- cut."""
    position, channel = np.indices((n_positions, width), np.uint32)
    noise = np.full((n_positions, width), np.inf)
    attempt = 0
    while (outside := np.abs(noise) > cut).any():
        counter = [channel, np.full_like(channel, attempt), position, np.zeros_like(position)]
        words = philox(counter, seed).astype(np.float64)
        radius = np.sqrt(-2 * np.log((words[0] + 0.5) / 2**32))
        noise = np.where(outside, radius * np.cos(2 * np.pi * words[1] / 2**32), noise)
        attempt += 1
    return noise


def sigmoid(x):
    return 0.5 * (1 + np.tanh(0.5 * x))


ACTIVATIONS = (
    lambda x: x * sigmoid(x),  # silu
    lambda x: 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),  # gelu
    lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),  # gelu_tanh
    lambda x: np.maximum(x, 0) ** 2,  # relu2
)


def rms_norm(x, weight, eps):
    normed = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return normed if weight is None else normed * weight


def attend(q, k, v, visible):
    """Attention of q [T, heads, d] to k and v [T, KV heads, d] where visible [T, T]."""
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("thd,shd->hts", q, k) / math.sqrt(q.shape[2])
    scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("hts,shd->thd", weights / weights.sum(axis=-1, keepdims=True), v)


def visible_positions(n, window, prefix_len):
    """[n, n]: row p is true where position p sees. A window of 0 shows all."""
    p, seen = np.indices((n, n))
    last = np.where(p < prefix_len, prefix_len - 1, p)
    return (seen <= last) & ((window == 0) | (seen > p - window))


def yarn_ramp(c, n):
    """How far each of n frequencies is interpolated, 0 .. 1."""

    def index_of(turns):  # of the frequency that makes so many turns in the trained positions
        positions = c.rope_original_positions / (turns * 2 * np.pi)
        return c.rotary_dim * math.log(positions) / (2 * math.log(c.rope_theta))

    low = max(math.floor(index_of(c.rope_beta_fast)), 0)
    high = min(math.ceil(index_of(c.rope_beta_slow)), c.rotary_dim - 1)
    return np.clip((np.arange(n) - low) / max(high - low, 0.001), 0, 1)


def rope_frequencies(c):
    """Radians a position of each rotated pair."""
    frequency = c.rope_theta ** (-np.arange(0, c.rotary_dim, 2) / c.rotary_dim)
    if c.rope_scaling == 0:
        return frequency
    if c.rope_scaling == 1:
        interpolated = 1.0
    elif c.rope_scaling == 2:
        turns = c.rope_original_positions * frequency / (2 * np.pi)
        low, high = c.rope_low_freq_factor, c.rope_high_freq_factor
        interpolated = 1 - np.clip((turns - low) / (high - low), 0, 1)
    else:
        interpolated = yarn_ramp(c, len(frequency))
    return frequency * (interpolated / c.rope_factor + 1 - interpolated)


def rotate(c, x):
    """x [T, heads, head_dim] with its leading rotary_dim channels rotated by the row's position."""
    if c.rope_style == 2:
        return x
    pairs = np.arange(c.rotary_dim)
    first, second = pairs.reshape(2, -1) if c.rope_style == 0 else pairs.reshape(-1, 2).T
    angles = np.arange(len(x))[:, None, None] * rope_frequencies(c)
    factor = c.rope_attention_factor if c.rope_scaling == 3 else 1.0
    cos, sin = factor * np.cos(angles), factor * np.sin(angles)
    out = x.copy()
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., second] * cos + x[..., first] * sin
    return out


class Reference:
    """Call it with tokens; see Output."""

    def __init__(self, config, tensors, *, init_scale=None, init_seed=0):
        self.config, self.tensors = config, tensors
        self.init_scale = config.init_scale if init_scale is None else init_scale
        self.init_seed = init_seed

    def __call__(self, tokens, loops=None, cache_window=0, *, prefix_len=0, init_state=None):
        c = self.config
        self.tokens, self.given_state = np.asarray(tokens), init_state
        self.cache_window, self.prefix_len = cache_window, prefix_len
        self.states, self.exit_logits, self.first_kv = [], [], {}
        x = c.embed_scale * self.tensors["embed.weight"][self.tokens]
        if c.schedule == 1:
            x = self.run_nested(x, *(loops or (c.cycles_high, c.cycles_low)))
        else:
            x = self.run_flat(x, loops or c.loops)
        x = self.norm(x, "final_norm", c.final_norm)
        logits = c.logit_scale * self.linear(x, "embed" if c.tied_head else "head")
        if c.logit_softcap:
            logits = c.logit_softcap * np.tanh(logits / c.logit_softcap)
        return Output(logits, np.array(self.states), np.array(self.exit_logits))

    def run_flat(self, x, loops):
        for s, stage in enumerate(self.config.stages):
            x = self.run_core(s, x, loops) if stage.looped else self.run_stage(s, x)
        self.states = self.states or [x]
        return x

    def run_core(self, s, x, loops):
        c = self.config
        e = self.norm(x, "prelude_norm", c.prelude_norm)
        x = self.initial_state(x)
        for loop in range(loops):
            if not (c.inject_skip_first and loop == 0):
                x = self.inject(x, e)
            x = self.run_stage(s, x, loop)
            self.states.append(x)
            if c.exit_mode:
                self.exit_logits.append(self.linear(x, "exit")[:, 0])
        if c.exit_mode and c.exit_threshold < 1:
            x = self.leave_early()
        if c.state_out_proj:
            x = self.linear(x, "state_out")
        if c.norm_after_last:
            x = self.norm(x, ("final_norm", "after_last_norm")[c.norm_after_last - 1], 1)
        return x

    def run_nested(self, high, high_cycles, low_cycles):
        low = self.initial_state(high)
        for _ in range(high_cycles):
            for _ in range(low_cycles):
                low = self.run_stage(0, low + high)
                self.states.append(low)
            high = self.run_stage(1, high + low)
            self.states.append(high)
        return high

    def initial_state(self, stage_input):
        c = self.config
        if self.given_state is not None:
            return np.asarray(self.given_state, np.float64)
        if c.state_init == 0:
            return stage_input
        if c.state_init == 4:
            return np.broadcast_to(self.tensors["state_init.weight"], stage_input.shape)
        if c.state_init == 2:
            return np.zeros_like(stage_input)
        noise = normal_noise(self.init_seed, c.init_cut, *stage_input.shape)
        return (self.init_scale * c.init_std * noise).astype(np.float32).astype(np.float64)

    def inject(self, state, e):
        t = self.tensors
        match self.config.inject:
            case 1:
                return state + e
            case 2:
                return self.linear(np.concatenate([state, e], axis=1), "inject")
            case 3:
                dt = np.logaddexp(0, t["inject.dt_bias"])
                kept = np.exp(-dt * np.exp(t["inject.a_log"]))
                return state * kept + dt * self.linear(e, "inject.b")
        return state

    def leave_early(self):
        """Each token's state after the first loop where the summed probability is enough."""
        summed = 1 - np.cumprod(sigmoid(-np.array(self.exit_logits)), axis=0)
        enough = summed >= self.config.exit_threshold
        enough[-1] = True
        return np.array(self.states)[enough.argmax(axis=0), np.arange(len(self.tokens))]

    def run_stage(self, s, x, loop=0):
        stage = self.config.stages[s]
        for n in range(stage.first_layer, stage.first_layer + stage.n_layers):
            name = f"layers.{n}"
            x = self.block(x, f"{name}.attn", lambda h, name=name: self.attention(h, name, loop))
            x = self.block(x, f"{name}.mlp", lambda h, name=name: self.mlp(h, name))
        return self.norm(x, f"stages.{s}.norm", stage.end_norm)

    def block(self, x, name, function):
        kind = 2 if self.config.norm_weightless else 1
        into = self.norm(x, f"{name}_norm", 0 if self.config.norm_placement == 3 else kind)
        if self.config.norm_placement == 0:
            return x + function(into)
        if self.config.norm_placement == 2:
            return self.norm(x + function(into), f"{name}_out_norm", kind)
        return x + self.norm(function(into), f"{name}_out_norm", kind)

    def attention(self, x, name, loop):
        c, t = self.config, self.tensors
        q, k = self.query_or_key(x, f"{name}.attn.q"), self.query_or_key(x, f"{name}.attn.k")
        v = self.linear(x, f"{name}.attn.v").reshape(k.shape)
        if f"{name}.attn.value_gate.weight" in t:
            gate = sigmoid(self.linear(x[:, : c.value_embed_channels], f"{name}.attn.value_gate"))
            table = t[f"{name}.attn.value_embed.weight"][self.tokens]
            v = v + 2 * gate[:, :, None] * table.reshape(v.shape)
        visible = visible_positions(len(x), self.cache_window, self.prefix_len)
        own = visible_positions(len(x), c.loop_window, self.prefix_len) if loop else True
        out = attend(q, k, v, visible & own)
        if c.loop_attention and loop:
            gate = np.einsum("thd,hd->th", q, t[f"{name}.attn.loop_gate.weight"])
            gate = sigmoid(gate + t[f"{name}.attn.loop_gate.bias"])[:, :, None]
            out = gate * attend(q, *self.first_kv[name], visible) + (1 - gate) * out
        elif c.loop_attention:
            self.first_kv[name] = k, v
        out = out.reshape(len(x), -1)
        if c.attn_out_gate:
            out = out * sigmoid(self.linear(x, f"{name}.attn.gate"))
        return self.linear(out, f"{name}.attn.o")

    def query_or_key(self, x, name):
        """[T, heads, head_dim], normed and rotated."""
        c, y = self.config, self.linear(x, name)
        weight = self.tensors.get(f"{name}_norm.weight")
        if c.qk_norm == 2:
            y = rms_norm(y, weight, c.qk_norm_eps)
        y = y.reshape(len(x), -1, c.head_dim)
        if c.qk_norm == 1 and c.qk_norm_after_rope:
            return rms_norm(rotate(c, y), weight, c.qk_norm_eps)
        return rotate(c, rms_norm(y, weight, c.qk_norm_eps) if c.qk_norm == 1 else y)

    def mlp(self, x, name):
        c, up = self.config, self.linear(x, f"{name}.mlp.up")
        gate = self.linear(x, f"{name}.mlp.gate") if c.mlp_kind == 0 else up
        activated = c.activation_scale * ACTIVATIONS[c.activation](gate)
        return self.linear(activated * up if c.mlp_kind == 0 else activated, f"{name}.mlp.down")

    def linear(self, x, name):
        return x @ self.tensors[f"{name}.weight"].T + self.tensors.get(f"{name}.bias", 0.0)

    def norm(self, x, name, kind):
        """kind: 0 none, 1 with weight, 2 weightless."""
        if kind == 0:
            return x
        weight = self.tensors[f"{name}.weight"] if kind == 1 else None
        return rms_norm(x, weight, self.config.norm_eps)
