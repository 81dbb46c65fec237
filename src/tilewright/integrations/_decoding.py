"""`decode`: transformers' loop over tokens with one compiled call a token, and nothing in it that waits for a GPU.

`model.generate(..., custom_generate=decode)` prepares everything and hands the loop to this. `GenerationMixin._sample` of
transformers 5.17 takes about a millisecond of Python and a dozen small kernels a token beside the model: inputs are prepared,
logits copied, processed and compared, tokens concatenated, criteria asked. For greedy search over a static cache most of that
is one argmax, which stands in the compiled step here; whether all sequences have ended is read from a copy that a GPU made
some tokens before.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, MutableMapping
from types import FunctionType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from transformers import EosTokenCriteria, MaxLengthCriteria, StaticCache
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GENERATION_MODES_MAPPING

import tilewright.dynamo
from tilewright.errors import UnsupportedError, say
from tilewright.recent import Recent

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

ENDS, NO_TOKEN = 8, -1  # tokens that end a sequence are filled up to a multiple of so many, so that one step serves most
_Step = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
KEPT, KEPT_BYTES = 2, 1 << 30  # caches of a model that are kept, and the most that one may take
LOOK = 8  # tokens between two looks at whether all sequences have ended, on a GPU


def decode(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    **model_kwargs: Any,
) -> Any:
    """Generate tokens greedily, as `model.generate` does without it: an argument `custom_generate` of that.

    The step is compiled with the options of `generation_config.compile_config`, or those of `torch.compile` by default. What
    it does not know (`_why_not`: sampling, processors, padded prompts, caches that grow, …) transformers' own loop does, and a
    warning says why.

    Args:
        model: a decoder of transformers.
        input_ids: the prompt, s64[batch, length].
        logits_processor, stopping_criteria, generation_config, model_kwargs: what `generate` prepared.

    Returns:
        torch.Tensor: prompt and tokens, s64[batch, length]; behind its last token a sequence is padded.

    Raises:
        UnsupportedError: the way to generate is one whose code transformers loads from elsewhere.
    """
    why = _why_not(model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs)
    if why is not None:
        say(f"decode leaves {type(model).__name__} to the loop of transformers: {why}")
        name = GENERATION_MODES_MAPPING[generation_config.get_generation_mode()]
        if not hasattr(model, name):  # it is a repository of code
            raise UnsupportedError(f"decode does not know {name}", hint="generate without custom_generate=")
        given = logits_processor, stopping_criteria, generation_config
        return getattr(model, name)(input_ids, *given, **model_kwargs)
    with torch.no_grad(), model._optimize_model_for_decode():
        return _decoded(model, input_ids, stopping_criteria, generation_config, model_kwargs)


def _why_not(
    model: Any,
    input_ids: torch.Tensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    given: Mapping[str, Any],
) -> str | None:
    """The reason why the loop is not done here; None if it is."""
    known = MaxLengthCriteria, EosTokenCriteria
    mask, held = given.get("attention_mask"), given.get("past_key_values")
    others = sorted({type(p).__name__ for p in processors} | {type(c).__name__ for c in criteria if not isinstance(c, known)})
    if config.get_generation_mode() is not GenerationMode.GREEDY_SEARCH:
        return "it is no greedy search"
    if others:
        return f"it asks {', '.join(others)} about each token"
    if given.get("streamer") is not None or given.get("synced_gpus") or config.return_dict_in_generate:
        return "somebody follows each token, or asks for more than tokens"
    if model.config.is_encoder_decoder or given.get("inputs_embeds") is not None:
        return "it reads more than a prompt of tokens"
    if not isinstance(held, StaticCache) or getattr(held, "_is_user_defined", False):
        return 'the cache is not one that generate made with cache_implementation="static"'
    if mask is not None and (mask.dim() != 2 or not bool(mask.all())):
        return "the prompt is padded"
    if input_ids.numel() == 0 or sorted({type(c).__name__ for c in criteria}) != sorted(type(c).__name__ for c in criteria):
        return "there is no prompt, or several ends of one kind"
    if criteria.max_length is None:
        return "there is no longest length"
    return None


def _decoded(
    model: Any, prompt: torch.Tensor, criteria: StoppingCriteriaList, config: GenerationConfig, given: dict[str, Any]
) -> torch.Tensor:
    batch, length = prompt.shape
    most, device = int(criteria.max_length or 0) - length, prompt.device
    ends = next((c.eos_token_id.to(device) for c in criteria if isinstance(c, EosTokenCriteria)), None)
    told = prompt.new_full((-(-max(1, 0 if ends is None else ends.numel()) // ENDS) * ENDS,), NO_TOKEN)
    if ends is not None:
        told[: ends.numel()] = ends
    pad = prompt.new_zeros(()) if config._pad_token_tensor is None else config._pad_token_tensor.to(device)  # type: ignore[attr-defined]
    held = given["past_key_values"] = _cache(model, given["past_key_values"], batch)
    sizes = told.numel(), _sizes(model, held, batch)
    step = _compiled(model, (sizes, *sorted(_options(config).items())), _options(config))
    logits = model._prefill(prompt, config, given).logits
    token = logits[:, -1].float().argmax(-1, keepdim=True)
    del logits
    over = torch.isin(token, told)
    position = torch.full((batch, 1), length, device=device)
    tokens, look = prompt.new_empty(batch, most), _Look(device)
    tokens[:, :1] = token
    made = 1
    while made < most and not (ends is not None and look(over)):
        token, position, over = step(model, held, token, position, over, told, pad)
        tokens[:, made : made + 1] = token
        made += 1
    tokens = tokens[:, :made]
    if ends is not None:  # the looks may come late
        open_ = ~torch.isin(tokens, ends).cumsum(1).bool().all(0)
        tokens = tokens[:, : int(open_.sum()) + 1]
    _keep(model, held, batch)
    return torch.cat([prompt, tokens], 1)


_caches: MutableMapping[Any, Recent[Hashable, StaticCache]] = WeakKeyDictionary()


def _sizes(model: Any, held: StaticCache, batch: int) -> Hashable:
    return batch, model.device, model.dtype, *((type(layer), getattr(layer, "max_cache_len", 0)) for layer in held.layers)


def _kind(model: Any, held: StaticCache, batch: int) -> Hashable:
    """The sequences that a cache serves: those of its sizes, of the modes and places that its tensors were made for, and of its
    stream, since work on it need not be over when `generate` returns."""
    kind = model.device.type
    stream = torch.cuda.current_stream(model.device).cuda_stream if kind == "cuda" else 0
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    placed = str(getattr(model, "hf_device_map", None))
    return _sizes(model, held, batch), stream, torch.is_inference_mode_enabled(), autocast, placed


def _cache(model: Any, new: StaticCache, batch: int) -> StaticCache:
    """The cache of an earlier sequence of the same kind, emptied: CUDA graphs hold its addresses. Else the new one, as it is
    where another thread has the earlier one."""
    found = _caches.get(model, {}).pop(_kind(model, new, batch), None)
    if found is None:
        return new
    found.reset()
    return found


def _keep(model: Any, held: StaticCache, batch: int) -> None:
    """Keep a cache whose sequence is over for one to come, if it takes no more than `KEPT_BYTES`."""
    tensors = (t for layer in held.layers for t in vars(layer).values() if isinstance(t, torch.Tensor))
    known = not held.offloading and all(type(layer) in (StaticLayer, StaticSlidingWindowLayer) for layer in held.layers)
    if known and sum(t.nbytes for t in tensors) <= KEPT_BYTES:
        _caches.setdefault(model, Recent(KEPT))[_kind(model, held, batch)] = held


def _step(
    model: Any,
    held: StaticCache,
    token: torch.Tensor,
    position: torch.Tensor,
    over: torch.Tensor,
    ends: torch.Tensor,
    pad: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The next token of each sequence, its position, and whether the sequence is over; all [batch, 1]."""
    logits = model(token, position_ids=position, past_key_values=held, use_cache=True).logits
    found = torch.where(over, pad, logits[:, -1].float().argmax(-1, keepdim=True))
    return found, position + 1, over | torch.isin(found, ends)


def _options(config: GenerationConfig) -> dict[str, Any]:
    """The options of the configuration's compiler, if they are meant for ours."""
    asked = config.compile_config
    return {} if asked is None or asked.backend != "tilewright" else dict(asked.options or {})


_steps: MutableMapping[Any, dict[Hashable, _Step]] = WeakKeyDictionary()


def _compiled(model: Any, key: Hashable, options: dict[str, Any]) -> _Step:
    """The step compiled for a model and its sizes, in code of its own: Dynamo gives up code that it compiled eight times."""
    tilewright.dynamo.register()
    steps = _steps.setdefault(model, {})
    if key not in steps:
        own = FunctionType(_step.__code__.replace(), _step.__globals__, _step.__name__)
        steps[key] = torch.compile(own, backend="tilewright", dynamic=False, options=options)
    return steps[key]


class _Look:
    """Tells whether all sequences are over: on a CPU at once, on a GPU by a copy that it made up to twice `LOOK` calls ago."""

    def __init__(self, device: torch.device) -> None:
        self._gpu, self._calls = device.type == "cuda", 0
        self._copy = torch.zeros((), dtype=torch.bool, pin_memory=self._gpu)
        self._made: torch.cuda.Event | None = None

    def __call__(self, over: torch.Tensor) -> bool:
        if not self._gpu:
            return bool(over.all())
        self._calls += 1
        if self._calls % LOOK:
            return False
        if self._made is not None:
            self._made.synchronize()
            if bool(self._copy):
                return True
        self._copy.copy_(over.all(), non_blocking=True)
        self._made = torch.cuda.Event()
        self._made.record()
        return False
