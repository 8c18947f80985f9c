"""Inputs of transformers' models by the names of their arguments, for `families.py`."""

import inspect
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

#: Arguments of a model.
Given = dict[str, Any]
#: Makes seeded random numbers of a shape, in the model's dtype.
Drawn = Callable[..., Tensor]
#: Arguments that a model may want although they have a default.
MAIN = {
    "input_ids", "decoder_input_ids", "pixel_values", "pixel_values_videos", "input_features",
    "input_values", "past_values",
}  # fmt: skip
#: Types whose main input is an image, and which take a text alone too.
TAKE_TEXT = ("idefics3", "kosmos-2", "smolvlm")
#: How many inputs are tried.
MAX = 64
#: Length of a text.
TOKENS = 96
#: Sides of the grid of patches of an image, and frames of a video.
GRID, FRAMES = 4, 8
#: Samples of a sound, a multiple of the steps of all codecs.
SAMPLES = 19200


def inputs(model: Any, dtype: torch.dtype) -> Iterator[Given]:
    """Inputs to try: what the model mainly takes and what it must be given, then what it may be.

    An argument has a few layouts, of an image for instance pixels and flat patches; all are tried.
    """
    generator = torch.Generator().manual_seed(13)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    arguments = inspect.signature(model.forward).parameters
    wanted = {
        name
        for name, each in arguments.items()
        if each.default is each.empty and each.kind is not each.VAR_KEYWORD
    }
    named = model.main_input_name
    mains = {named} if isinstance(named, str) else set(named)
    if model.config.model_type in TAKE_TEXT:
        mains = {"input_ids"}
    first = wanted | (mains & arguments.keys()) or mains
    groups = []
    for layouts in (words, images, videos, spectra, samples, series, states):
        kept = [
            {name: value for name, value in layout.items() if name in arguments or name in first}
            for layout in layouts(model, drawn)
        ]
        groups.append([layout for layout in kept if layout])
    groups = [group for group in groups if group]
    leading = [group for group in groups if any(first & layout.keys() for layout in group)]
    tried: list[Given] = []
    for chosen in (leading, [*groups[:1], *leading], groups):
        for parts in product(*chosen):
            whole = {name: value for part in parts for name, value in part.items()}
            least = {name: whole[name] for name in whole if name in MAIN | first}
            for each in (least, whole):
                if each and not any(alike(each, other) for other in tried):
                    tried.append(each)
                    yield each
                if len(tried) == MAX:
                    return


def alike(one: Given, other: Given) -> bool:
    return one.keys() == other.keys() and all(one[name] is other[name] for name in one)


def part(config: Any, names: str, otherwise: Any) -> Any:
    """A size of a model, or of the first part of it that has one, by the first name it has."""
    parts = [config, *(getattr(config, each, None) for each in config.sub_configs)]
    found = (getattr(each, name, None) for name in names.split() for each in parts)
    return next((value for value in found if value), otherwise)


def words(model: Any, drawn: Drawn) -> list[Given]:
    config, tokens = model.config, torch.arange(3, 3 + TOKENS).remainder(300)[None]
    ones, places = torch.ones_like(tokens), torch.arange(TOKENS)
    given: Given = {"input_ids": tokens, "token_type_ids": 0 * ones, "attention_mask": ones}
    if config.is_encoder_decoder:
        given["decoder_input_ids"] = tokens[:, :24]
    if config.model_type == "dia":
        books = part(config, "num_channels", 1)
        given["decoder_input_ids"] = tokens[..., None].expand(-1, -1, books)
    if config.model_type == "kyutai_speech_to_text":
        given["input_ids"] = tokens[..., None].expand(-1, -1, config.num_codebooks + 1)
    if config.model_type.startswith("musicgen"):
        books = config.decoder.num_codebooks
        given["decoder_input_ids"] = tokens[:, :24].expand(books, -1)
    given["task_inputs"] = tokens
    given["image_embeds_position_mask"] = (places < 64).long()[None]
    given["bbox"] = torch.stack([places, places, places + 9, places + 9], dim=-1)[None]
    given["qformer_input_ids"] = given["classes_input_ids"] = given["tasks_input_ids"] = tokens
    return [given]


def images(model: Any, drawn: Drawn) -> list[Given]:
    """Pixels, a batch of images a prompt, patches, and patches in a batch."""
    config = model.config
    high, wide = sides(config)
    pixels = drawn(1, part(config, "num_channels in_channels", 3), high, wide)
    deep, count = part(config, "temporal_patch_size", 1), GRID * GRID
    size = part(config, "patch_size", 14)
    side, colours = size if isinstance(size, int) else size[0], pixels.shape[1]
    flat = drawn(count, colours * deep * side**2)
    merged = side * part(config, "spatial_merge_size", 1)
    grid = torch.tensor([[1, GRID, GRID]])
    places = torch.cartesian_prod(torch.arange(GRID), torch.arange(GRID))[None]
    counted = dict.fromkeys(("grid_thw", "image_grid_thw"), grid)
    ones = torch.ones(1, count, dtype=torch.int64)
    return [
        {
            "pixel_values": pixels, "pixel_mask": torch.ones(1, high, wide, dtype=torch.int64),
            "prompt_pixel_values": pixels, "prompt_masks": pixels,
        },
        {"pixel_values": flat, **counted, "merge_sizes": torch.tensor([1])},
        {"hidden_states": flat, **counted},
        {"pixel_values": drawn(count, 2 * flat.shape[1]), **counted},
        {"pixel_values": drawn(count, colours, side, side), **counted},
        {"pixel_values": drawn(count, merged, merged, colours), **counted},
        {
            "pixel_values": flat[None], "pixel_attention_mask": ones, "pixel_position_ids": places,
            "spatial_shapes": grid[:, 1:], "target_sizes": grid[:, 1:],
        },
        {
            "pixel_values": pixels[:, None],
            "image_attention_mask": torch.ones(1, TOKENS, 1, dtype=torch.int64),
        },
        {"pixel_values": pixels[:, None].expand(-1, 2, -1, -1, -1)},
        {"pixel_values": pixels[..., : high - high % (4 * side), : wide - wide % (4 * side)]},
        *({"pixel_values": each["pixel_values_videos"]} for each in videos(model, drawn)),
    ]  # fmt: skip


def videos(model: Any, drawn: Drawn) -> list[Given]:
    config = model.config
    count = part(config, "num_frames frames_per_clip", FRAMES)
    frames = drawn(1, count, part(config, "num_channels in_channels", 3), *sides(config))
    return [{"pixel_values_videos": frames}]


def sides(config: Any) -> tuple[int, int]:
    size: Any = part(config, "image_size max_img_size", 224)
    if config.model_type == "seggpt":  # of an image below its prompt
        size = size[0] // 2, size[1]
    if isinstance(size, dict):
        size = size["height"], size["width"]
    if ratios := getattr(config, "scaled_images_ratios", None):
        size = int(config.patch_size / min(ratios))
    return tuple(size) if isinstance(size, (list, tuple)) else (size, size)


def spectra(model: Any, drawn: Drawn) -> list[Given]:
    """Bands of a spectrum by time, time by bands, in channels, and some frames stacked."""
    config = model.config
    names = "num_mel_bins input_feat_size input_feat_per_channel feature_projection_input_dim"
    bands = part(config, f"{names} feature_size mel_bins", 128)
    bands *= part(config, "num_stacked_frames", 1)
    time = part(config, "max_length", 0) or 2 * part(config, "max_source_positions", 160)
    spectrum = drawn(1, bands, time)
    turned = spectrum.transpose(1, 2).contiguous()
    mask = torch.ones(1, time, dtype=torch.int64)
    longer = torch.ones(1, 1, dtype=torch.bool)
    masks = {"input_features_mask": mask, "audio_mel_mask": mask.bool(), "is_longer": longer}
    return [
        {"input_features": spectrum, **masks},
        {"input_features": turned, "audio_mel": turned, **masks},
        {"input_features": turned[:, None], **masks},
        {"input_features": turned[:, None].expand(1, 4, -1, -1), **masks},
        {"input_features": drawn(1, time, 4 * bands), **masks},
        {"input_features": turned[:, : SAMPLES // 320]},
        {"input_features": drawn(1, bands, 8 * TOKENS)},
    ]


def samples(model: Any, drawn: Drawn) -> list[Given]:
    """Samples, with a channel, and time by bands."""
    sound = drawn(1, SAMPLES)
    turned = [each["input_features"] for each in spectra(model, drawn)[1:2]]
    return [{"input_values": each} for each in (sound, sound[:, None], *turned)]


def series(model: Any, drawn: Drawn) -> list[Given]:
    config = model.config
    time = part(config, "context_length", 64)
    wide = part(config, "num_input_channels", 1)
    lags = max(part(config, "lags_sequence", [0]))
    past = drawn(1, time + lags, wide)
    ones, features = torch.ones(1, time + lags), part(config, "num_time_features", 0)
    ahead = part(config, "prediction_length", 24)
    return [
        {"past_values": past, "past_observed_mask": torch.ones_like(past)},
        {
            "past_values": past[..., 0], "past_values_padding": 0 * ones.long(),
            "past_observed_mask": ones, "past_time_features": drawn(1, time + lags, features),
            "future_time_features": drawn(1, ahead, features), "future_values": drawn(1, ahead),
            "freq": torch.zeros(1, 1, dtype=torch.int64),
        },
    ]  # fmt: skip


def states(model: Any, drawn: Drawn) -> list[Given]:
    """States of other models, or of a world."""
    config = model.config
    width = part(config, "hidden_size d_model", 128)
    names = inspect.signature(model.forward).parameters
    if "shared_kv_states" in names:
        return [shared(model, drawn)]
    if "states" in names:
        acts, world = drawn(1, 8, config.act_dim), drawn(1, 8, config.state_dim)
        steps, one = torch.arange(8)[None], drawn(1, 8, 1)
        given = {"states": world, "actions": acts, "rewards": one, "returns_to_go": one}
        return [{**given, "timesteps": steps, "attention_mask": torch.ones(1, 8)}]
    patch = part(config, "patch_size", 16)
    patch = patch if isinstance(patch, int) else patch[0]
    boxes = drawn(1, 10, 4).sigmoid()
    context = drawn(1, 8, width * len(part(config, "target_layer_ids", [0])))
    patches = drawn(1, 16, 2 + 3 * patch * patch)
    patches[..., :2] = 1  # their row and column
    return [
        {
            "query_embeds": drawn(1, 16, width),
            "encoder_hidden_states": drawn(1, 16, part(config, "encoder_hidden_size", width)),
            "state": drawn(1, part(config, "max_state_dim", 32)),
            "noise_embeds": drawn(1, 8, width), "context_hidden_states": context,
            "latents": drawn(1, width, 10),
            "visual_feats": drawn(1, 10, part(config, "visual_feat_dim", 2048)),
            "visual_pos": boxes, "flattened_patches": patches,
        },
    ]  # fmt: skip


def shared(model: Any, drawn: Drawn) -> Given:
    """For an assistant: states of a larger model, with its keys and values by kind of layer."""
    pairs = {}
    for layer in (each for each in model.modules() if hasattr(each, "is_kv_shared_layer")):
        heads = layer.config.num_attention_heads // layer.num_key_value_groups
        shape = 1, heads, TOKENS, layer.head_dim
        pairs.setdefault(layer.layer_type, (drawn(*shape), drawn(*shape)))
    return {
        "inputs_embeds": drawn(1, 1, 2 * model.config.backbone_hidden_size),
        "shared_kv_states": pairs,
    }
