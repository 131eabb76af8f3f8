"""Draws how a model runs: its stages from top to bottom, and what is looped in frames around them.

    tokens
      |
    embedding       x = embed[token]
      |
+---->|             runs 8 times
|     |
|   layers 0 to 3   stage 0, looped
|     |
+-----+
      |
    logits
"""

import textwrap
from collections.abc import Mapping
from typing import NamedTuple

from .config import Config, Stage
from .costs import is_nested

WIDTH = 100  # columns that a line may have
_FRAME = 4  # columns of a loop's frame, on its left
_GAP = 3  # columns between a step and its note


class _Row(NamedTuple):
    left: str
    note: str
    below: str  # what stands on the left of the note's further lines


class Diagram:
    """Rows of a step and its note, with frames around those that are looped."""

    def __init__(self, max_depth: int) -> None:
        self._rows: list[_Row] = []
        self._margin = _FRAME * max_depth
        self._depth = 0

    def step(self, name: str, *notes: str) -> None:
        """What stands on the line that runs from top to bottom."""
        if self._rows:
            self._add(self._line(), "")
        first, *more = notes or ("",)
        self._add(self._frames().ljust(self._margin) + name, first)
        for note in more:
            self._add(self._line(), note)

    def note(self, *notes: str) -> None:
        """Lines about what happens between two steps."""
        for note in ("", *notes):
            self._add(self._line(), note)

    def begin_loop(self, note: str) -> None:
        """What follows, until end_loop, is run more than once."""
        self._add(self._line(), "")
        start = self._frames()
        self._depth += 1
        line = self._line()
        self._add(start + "+" + "-" * (len(line) - len(start) - 3) + ">|", note)

    def end_loop(self) -> None:
        """Ends what begin_loop began."""
        line = self._line()
        self._add(line, "")
        self._depth -= 1
        start = self._frames()
        self._add(start + "+" + "-" * (len(line) - len(start) - 2) + "+", "")

    def lines(self) -> list[str]:
        """The drawing, at most WIDTH columns wide where words allow it."""
        column = max(len(row.left) for row in self._rows) + _GAP
        lines = []
        for row in self._rows:
            first, *more = textwrap.wrap(row.note, WIDTH - column, break_long_words=False) or [""]
            lines.append(f"{row.left:<{column}}{first}".rstrip())
            lines += [f"{row.below:<{column}}{part}" for part in more]
        return lines

    def _add(self, left: str, note: str) -> None:
        self._rows.append(_Row(left, note, self._line()))

    def _frames(self) -> str:
        return "|".ljust(_FRAME) * self._depth

    def _line(self) -> str:
        return self._frames().ljust(self._margin) + "  |"


def draw(config: Config, parameters: Mapping[int, int] | None = None) -> list[str]:
    """The lines of the drawing. `parameters`: numbers in each stage's layers, if they are known."""
    nested = is_nested(config)
    diagram = Diagram(max_depth=2 if nested else 1)
    diagram.step("tokens")
    scale = "" if config.embed_scale == 1 else f"{config.embed_scale:g} "
    diagram.step("embedding", f"{'high' if nested else 'x'} = {scale}embed[token]")
    if nested:
        _draw_nested(diagram, config, parameters or {})
    else:
        _draw_flat(diagram, config, parameters or {})
    _draw_end(diagram, config, "high" if nested else "x")
    return diagram.lines()


# ---- A flat schedule ------------------------------------------------------------------------


def _draw_flat(diagram: Diagram, config: Config, parameters: Mapping[int, int]) -> None:
    for s, stage in enumerate(config.stages):
        if stage.looped:
            _draw_core(diagram, config, s, parameters)
        else:
            diagram.step(_layers(stage), _stage_note(s, "run once", parameters))
            _draw_end_norm(diagram, config, s, "x")


def _draw_core(diagram: Diagram, config: Config, s: int, parameters: Mapping[int, int]) -> None:
    stage = config.stages[s]
    state = "s" if config.inject or config.state_init else "x"
    if state == "s":
        diagram.note(*_entry(config))
    diagram.begin_loop(_loops(config))
    if config.inject:
        diagram.step("inject", _injection(config))
    diagram.step(_layers(stage), _stage_note(s, "looped", parameters), *_loop_attention(config))
    _draw_end_norm(diagram, config, s, state)
    if config.exit_mode:
        diagram.step("exit gate", *_exit(config, state))
    diagram.end_loop()
    if config.state_out_proj:
        diagram.step("projection", f"x = state_out {state}")
        state = "x"
    if config.norm_after_last:
        which = {1: "final_norm", 2: "after_last_norm"}.get(config.norm_after_last)
        name = which or config.variant("norm_after_last")
        diagram.step("norm", f"x = {name}({state}), once after the last loop")
    elif state == "s":
        diagram.note("x = s")


def _entry(config: Config) -> list[str]:
    """What the loops are given, and what they start from."""
    notes = []
    if config.inject:
        source = {0: "embedding", 1: "x", 2: "the other state"}.get(config.inject_source)
        source = source or config.variant("inject_source")
        notes.append(f"e = {f'prelude_norm({source})' if config.prelude_norm else source}")
    return [*notes, f"s = {_initial_state(config, 'x')}"]


def _initial_state(config: Config, stage_input: str) -> str:
    match config.state_init:
        case 0:
            return stage_input
        case 2:
            return "0"
        case 3:
            std, cut = f"{config.init_std:g}", f"{config.init_cut:g}"
            return f"noise: {config.init_scale:g} x normal of std {std}, cut at {cut} std"
        case 4:
            return "state_init, a stored vector"
    return config.variant("state_init")


def _loops(config: Config) -> str:
    low, high = config.loops_min or 1, config.loops_max or 1024
    allowed = f"only {low}" if low == high else f"{low} to {high}"
    trained = f", trained up to {config.loops_max_trained}" if config.loops_max_trained else ""
    return f"runs {_times(config.loops)} by default; {allowed} allowed{trained}"


def _injection(config: Config) -> str:
    formula = {
        1: "s = s + e",
        2: "s = inject [s; e], a matrix",
        3: "s = s exp(-dt A) + dt (b e), A = exp(a_log), dt = softplus(dt_bias)",
    }.get(config.inject, config.variant("inject"))
    return formula + (", but not in the first loop" if config.inject_skip_first else "")


def _loop_attention(config: Config) -> list[str]:
    window = f"its last {config.loop_window:,} positions" if config.loop_window else ""
    if config.loop_attention == 0:
        return [f"loops after the first attend to {window}"] if window else []
    if config.loop_attention != 1:
        return [f"attention: {config.variant('loop_attention')}"]
    gate = {0: "loop_gate q + bias", 1: "loop_gate x + bias"}.get(config.gate_input)
    return [
        "loops after the first: g first + (1 - g) own,",
        f"g = sigmoid({gate or config.variant('gate_input')}) for each head,",
        "first: attention to the first loop's KV,",
        f"own: attention to the loop's own KV{', ' * bool(window)}{window}",
    ]


def _exit(config: Config, state: str) -> list[str]:
    if config.exit_mode != 1:
        threshold = f"threshold {config.exit_threshold:g}"
        return [f"{config.variant('exit_mode')}, {threshold}"]
    return [
        f"lambda = sigmoid(exit {state} + bias), the share of what is left that leaves here",
        f"threshold {config.exit_threshold:g}: a token takes "
        + ("the last loop" if config.exit_threshold >= 1 else "the first loop that gets there"),
    ]


# ---- A nested schedule ----------------------------------------------------------------------


def _draw_nested(diagram: Diagram, config: Config, parameters: Mapping[int, int]) -> None:
    low_stage, high_stage = config.stages
    add = config.inject == 1 and config.inject_source == 2
    other = f"inject: {config.variant('inject')} {config.variant('inject_source')}"
    diagram.note(f"low = {_initial_state(config, 'high')}")
    diagram.begin_loop(f"H: runs {_times(config.cycles_high)} by default")
    diagram.begin_loop(f"L: runs {_times(config.cycles_low)} by default")
    diagram.step("add", "low = low + high" if add else other)
    diagram.step(_layers(low_stage), _stage_note(0, "the low one", parameters))
    _draw_end_norm(diagram, config, 0, "low")
    diagram.end_loop()
    diagram.step("add", "high = high + low" if add else other)
    diagram.step(_layers(high_stage), _stage_note(1, "the high one", parameters))
    _draw_end_norm(diagram, config, 1, "high")
    diagram.end_loop()


# ---- Parts of both --------------------------------------------------------------------------


def _draw_end(diagram: Diagram, config: Config, state: str) -> None:
    if config.final_norm:
        name = {1: "final_norm", 2: "norm"}.get(config.final_norm, config.variant("final_norm"))
        diagram.step("norm", f"x = {name}({state}){_weightless(config.final_norm)}")
        state = "x"
    scale = "" if config.logit_scale == 1 else f"{config.logit_scale:g} "
    logits = f"logits = {scale}{'embed' if config.tied_head else 'head'} {state}"
    tied = ", tied to the embedding" if config.tied_head else ""
    diagram.step("head", f"{logits}{tied}")
    if config.logit_softcap:
        cap = f"{config.logit_softcap:g}"
        diagram.step("softcap", f"logits = {cap} tanh(logits / {cap})")
    diagram.step("logits")


def _draw_end_norm(diagram: Diagram, config: Config, s: int, state: str) -> None:
    norm = config.stages[s].end_norm
    if norm:
        name = {1: f"stages.{s}.norm", 2: "norm"}.get(norm, f"unknown ({norm}) norm")
        diagram.step("norm", f"{state} = {name}({state}){_weightless(norm)}")


def _weightless(norm: int) -> str:
    return ", weightless" if norm == 2 else ""


def _layers(stage: Stage) -> str:
    last = stage.first_layer + stage.n_layers - 1
    return f"layer {last}" if stage.n_layers == 1 else f"layers {stage.first_layer} to {last}"


def _stage_note(s: int, runs: str, parameters: Mapping[int, int]) -> str:
    size = f", {parameters[s]:,} parameters" if s in parameters else ""
    return f"stage {s}, {runs}{size}"


def _times(n: int) -> str:
    return "once" if n == 1 else f"{n:,} times"
