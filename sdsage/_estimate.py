"""How much memory a job takes, part by part, from the headers of its files: an estimate, where `_memory` has bounds.

A part's compute buffer is what the engine's graph planner reserves for it. The numbers below are what it reserved
(its messages "compute buffer size") for networks of the real widths; it does so by arithmetic, so that they hold for
every device. What CUDA takes beside that was measured on one GPU (benchmarks/results/memory.json).
"""

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from sdsage._bounds import aligned_frames
from sdsage._headers import Header, Tensor, look
from sdsage._headers.types import WIDENED, stored_bytes
from sdsage._kinds import Contents, Part, Role, contents
from sdsage._limits import hires_size
from sdsage.params import SdCtxParams, SdImgGenParams, SdTilingParams, SdVidGenParams

MIB = 2**20
CPU = "cpu"
CONTEXT = 650 * MIB  # CUDA's own, per process
ERROR = 0.15  # how far the estimate may be off
_T5_COMPUTE, _LEAST_TEXT = 297 * MIB, 10 * MIB  # umt5-xxl and t5xxl with 512 tokens; their scores alone
_OTHER_TEXT_COMPUTE = 400 * MIB
_HEAD = 128
_LT_WORKSPACE = 32 * MIB  # of a linear layer, beside its weight in 16 or 8 bits
# Bytes a pixel of the VAEs' compute buffers by frames, at the stock widths; they rise and then stay.
_WAN21_DECODE = {1: 7_500, 5: 31_800, 9: 45_800, 13: 48_500, 25: 50_600, 29: 52_500, 57: 53_900, 121: 55_800}
_WAN22_DECODE = {1: 10_030, 5: 38_000, 9: 49_800, 13: 54_400, 49: 54_900, 81: 55_900, 121: 56_500}
_WAN_ENCODE = {1: 7_500, 5: 29_800, 9: 36_100, 17: 39_200, 33: 40_700, 81: 41_300}
# The same with the lever "vae", whose scratch memory is in the buffer.
_WAN21_DECODE_LEVER = {1: 1_880, 5: 10_210, 9: 17_050, 13: 18_550, 33: 19_520, 57: 20_340, 121: 21_020}
_WAN22_DECODE_LEVER = {1: 2_140, 5: 10_690, 9: 15_440, 13: 16_580, 33: 17_880, 81: 19_590}
_WAN_ENCODE_LEVER = {1: 1_960, 5: 8_170, 9: 12_120, 17: 18_000, 33: 23_980, 81: 34_610}
_KL_DECODE, _TAESD_DECODE = 6_656, 1_921
_WAN_POOL = 727  # of CUDA's pool, for the results of convolutions
_TILE, _ENCODE_TILE = 32, 1.30539  # latent pixels; how much larger a tile is for the encoder
# What the engine leaves in the format of the file when --type is given.
_KEPT = ("img_in.", "txt_in.", "time_in.", "vector_in.", "guidance_in.", "final_layer.", "x_embedder.", "t_embedder.",
         "y_embedder.", "pos_embed", "context_embedder.", "time_embed.", "label_emb.", "embedding")  # fmt: skip


@dataclass(frozen=True)
class Module:
    """A network of the run.

    Attributes:
        weights: bytes.
        compute: bytes of its compute buffer; `pool`: what CUDA's pool adds.
        known: the compute buffer is a measured formula, not a guess.
    """

    name: str
    device: str
    weights: int
    compute: int = 0
    pool: int = 0
    known: bool = True
    block: int = 0  # bytes of the weights that one block needs


@dataclass(frozen=True)
class Stage:
    """What is in a device's memory at one time."""

    name: str
    bytes: int
    known: bool


@dataclass(frozen=True)
class Way:
    """How a run uses memory: what --vram chooses."""

    offload: bool
    tiling: bool
    max_vram: float = 0.0  # GiB; 0 does not cut


@dataclass(frozen=True)
class Estimate:
    """The modules of a run.

    Attributes:
        diffusion: the experts, in the order of their work.
        vae: what encodes and decodes, whole and tile by tile. `encode`: its compute buffer for an input picture, 0
            without one.
        frees: weights are given back once their part of the job is done.
    """

    text: Module | None
    diffusion: tuple[Module, ...]
    vae: Module | None
    tiled: Module | None
    device: str
    frees: bool
    encode: int = 0
    encode_tiled: int = 0
    others: tuple[Module, ...] = field(default=())

    def stages(self, way: Way) -> list[Stage]:
        """What `device` holds in each stage; CUDA's own context is left out."""
        vae = self.tiled if way.tiling else self.vae
        encode = self.encode_tiled if way.tiling else self.encode
        encoder = replace(vae, compute=encode, pool=0) if vae is not None and encode else None
        # of each: until which place in the list its weights are needed
        last = 2 + len(self.diffusion)
        chain = [("text encoder", self.text, 0), ("encode picture", encoder, -1)]
        chain += [("sampling", m, 2 + i) for i, m in enumerate(self.diffusion)] + [("decode", vae, last)]
        found, pool = [], 0
        for at, (name, m, _) in enumerate(chain):
            if m is None or m.device != self.device:
                continue
            if way.offload:
                found.append(Stage(name, self._offloaded(m, way, name), m.known))
                continue
            held = sum(
                x.weights
                for _, x, end in chain
                if x is not None and x.device == self.device and end >= 0 and (end >= at or not self.frees)
            )
            pool = max(pool, m.pool)  # it never becomes smaller
            found.append(Stage(name, held + self._extra + m.compute + pool, m.known))
        if not way.offload:  # there is room for all weights before the first stage frees any
            every = sum(x.weights for _, x, end in chain if x is not None and x.device == self.device and end >= 0)
            found.append(Stage("loading", every + self._extra, True))
        return found

    @property
    def _extra(self) -> int:
        return sum(m.weights for m in self.others if m.device == self.device)

    def _offloaded(self, module: Module, way: Way, name: str) -> int:
        whole = module.weights + module.compute + module.pool
        if not way.max_vram or name not in ("sampling", "text encoder"):  # VAEs are not cut
            return whole
        least = module.block + module.compute + module.pool
        return max(least, min(whole, int(way.max_vram * 2**30) + module.pool))

    @property
    def pool(self) -> int:
        """What CUDA's pool takes beside a calculation in parts."""
        return max((m.pool for m in self.diffusion), default=0)

    def peak(self, way: Way) -> Stage:
        """The stage that takes most; zero bytes when nothing runs on the device."""
        return max(self.stages(way), key=lambda s: s.bytes, default=Stage("nothing", 0, True))

    def host(self, way: Way) -> int:
        """Bytes of weights in the computer's own memory."""
        chain = [m for m in (self.text, *self.diffusion, self.vae, *self.others) if m is not None]
        return sum(m.weights for m in chain if way.offload or m.device == CPU)


def estimate(
    ctx: SdCtxParams, job: SdImgGenParams | SdVidGenParams, device: str, levers: tuple[str, ...] = ()
) -> Estimate | None:
    """The estimate for a run whose model is on `device`; None when its files tell too little.

    Args:
        levers: those that work on the device.
    """
    files = {name: _open(getattr(ctx, name)) for name in _FIELDS}
    model = files["diffusion_model_path"] or files["model_path"]
    part = model[1].part(Role.DIFFUSION) if model is not None else None
    if model is None or part is None:
        return None
    weigh = _weigher(ctx)
    width, height, frames = _sizes(job)
    text_device = CPU if ctx.keep_clip_on_cpu else device
    vae_device = CPU if ctx.keep_vae_on_cpu else device
    whole = files["diffusion_model_path"] is None
    diffusion = [
        _diffusion(part, _tensors(model, Role.DIFFUSION, whole), weigh, ctx, (width, height, frames), device, levers)
    ]
    high = files["high_noise_diffusion_model_path"]
    if high is not None and part.kind.startswith("wan"):
        tensors = _tensors(high, Role.DIFFUSION, False)
        diffusion.insert(0, _diffusion(part, tensors, weigh, ctx, (width, height, frames), device, levers))
    text = _text(files, whole, weigh, text_device)
    sizes = (width, height, frames)
    packed = "vae" in levers and vae_device != CPU
    vae = _vae(files, ctx, whole, weigh, vae_device, sizes, None, packed)
    tiled = _vae(files, ctx, whole, weigh, vae_device, sizes, job.vae_tiling_params, packed)
    encodes = _encodes(part, job)
    others = tuple(
        Module(name, device, sum(map(weigh, h.tensors.items())))
        for name, file in (("vision encoder", files["clip_vision_path"]), ("ControlNet", files["control_net_path"]))
        if file is not None
        for h in (file[0],)
    )
    frees = bool(ctx.free_params_immediately and ctx.was_set("free_params_immediately"))
    encode = [
        _encode(m, frames, larger, packed) if encodes else 0 for m, larger in ((vae, 1.0), (tiled, _ENCODE_TILE**2))
    ]
    return Estimate(text, tuple(diffusion), vae, tiled, device, frees, encode[0], encode[1], others)


_FIELDS = ("model_path", "diffusion_model_path", "high_noise_diffusion_model_path", "clip_l_path", "clip_g_path",
           "t5xxl_path", "llm_path", "vae_path", "taesd_path", "clip_vision_path", "control_net_path")  # fmt: skip
File = tuple[Header, Contents]
Weigher = Callable[[tuple[str, Tensor]], int]


def _open(path: str | None) -> File | None:
    header = look(path)
    return None if header is None else (header, contents(header))


def _sizes(job: SdImgGenParams | SdVidGenParams) -> tuple[int, int, int]:
    if isinstance(job, SdVidGenParams):
        return job.width, job.height, aligned_frames(job.video_frames)
    wide, high = hires_size(job) or (job.width, job.height)
    return wide, high, 1


def _weigher(ctx: SdCtxParams) -> Weigher:
    """Bytes of a tensor once it is loaded."""
    wtype = ctx.wtype.engine_name if ctx.wtype.is_weight_type and ctx.was_set("wtype") else ""

    def weigh(item: tuple[str, Tensor]) -> int:
        name, t = item
        values = math.prod(t.shape)
        matrix = len(t.shape) == 2 and name.endswith(".weight") and not any(k in name for k in _KEPT)
        if wtype and matrix:
            return stored_bytes(wtype, values)
        if len(t.shape) > 2 and not t.type.startswith(("q", "iq")):
            return 2 * values  # kernels of convolutions are kept in 16 bits
        return WIDENED[t.type] * values if t.type in WIDENED else t.nbytes

    return weigh


def _tensors(file: File, role: Role, whole: bool) -> dict[str, Tensor]:
    """Those of one part; of a file that is not a whole checkpoint, all."""
    header, holds = file
    if not whole:
        return header.tensors
    names = holds.shapes(role)
    return {n: t for n, t in header.tensors.items() if any(n.endswith(s) for s in _ends(n, names))}


def _ends(name: str, names: dict[str, tuple[int, ...]]) -> tuple[str, ...]:
    """The name without its first one to four words, where the part has it."""
    words = name.split(".")
    return tuple(end for i in range(1, min(5, len(words))) if (end := ".".join(words[i:])) in names)


def _diffusion(
    part: Part,
    tensors: dict[str, Tensor],
    weigh: Weigher,
    ctx: SdCtxParams,
    sizes: tuple[int, int, int],
    device: str,
    levers: tuple[str, ...],
) -> Module:
    weights = sum(map(weigh, tensors.items()))
    flash = ctx.flash_attn or ctx.diffusion_flash_attn or ctx.sage_attn
    blocks = max(1, sum(v for k, v in part.facts.items() if k.endswith("blocks") and isinstance(v, int)))
    width, height, frames = sizes
    if part.kind.startswith("wan"):
        compute, tokens, inner = _wan_compute(part, width, height, frames, flash, levers, ctx.fast_linear)
        known = part.kind != "wan-vace"
    else:
        known = part.kind in ("flux", "flux-fill", "flux-control")
        tokens = -(-width // 16) * -(-height // 16) + (256 if known else 512)  # with those of the text
        dim = part.width or 3072
        compute = int(tokens * 4 * dim * (15.3 if flash else 12.3))
        compute += 0 if flash else tokens * tokens * (dim // _HEAD) * 4
        inner = 4 * dim
    quantized = any(t.type.startswith(("q", "iq")) and len(t.shape) == 2 for t in tensors.values())
    if "linear" in levers:
        pool = 0
        compute += _LT_WORKSPACE + part.width * inner * (1 if ctx.fast_linear else 2)
        kinds = {t.type for t in tensors.values() if len(t.shape) == 2}
        if any(kind.startswith(("q", "iq")) and kind != "q8_0" for kind in kinds):
            compute += part.width * inner * 2  # the weight as F16 on its way
    else:
        pool = int(tokens * inner * (36 / 32 if quantized else 2))
    pool += tokens * part.width if ctx.sage_attn else 0
    return Module(
        "diffusion model", device, weights, compute, 0 if device == CPU else pool, known, 2 * weights // blocks
    )


def _wan_compute(
    part: Part, width: int, height: int, frames: int, flash: bool, levers: tuple[str, ...], fp8: bool
) -> tuple[int, int, int]:
    """Bytes, tokens, and the width of the largest layer."""
    ti2v = part.latents == 48
    cell = 32 if ti2v else 16
    tokens = -(-width // cell) * -(-height // cell) * ((frames - 1) // 4 + 1)
    dim = part.width
    inner = int(part.facts.get("ffn", 0)) or 4 * dim
    step = max(6 * dim, (3 if ti2v else 2) * dim + inner)  # attention, or the feed-forward layer
    text = 512 * dim * 4  # the features of the prompt
    compute = tokens * (4 * step + 1800) + text * (2 if ti2v else 1)
    if "fuse" in levers and not ti2v:  # whose modulation has a timestep for each frame
        token = max(20 * dim, 8 * dim + 4 * inner)
        if "linear" in levers:  # in BF16 and FP8: what linear layers read
            token = max(19 * dim, 4 * dim + 3 * inner) if fp8 else max(22 * dim, 10 * dim + 2 * inner)
        compute = tokens * (token + 1300) + text
    if not flash:
        scores = tokens * tokens * max(1, dim // _HEAD) * 4
        compute = max(compute, scores + tokens * dim * 21 + 3 * text)
    return compute, tokens, inner


def _text(files: dict[str, File | None], whole: bool, weigh: Weigher, device: str) -> Module | None:
    weights, compute = 0, 0
    for name in ("clip_l_path", "clip_g_path", "t5xxl_path", "llm_path"):
        file = files[name]
        encoder = file[1].part(Role.TEXT) if file is not None else None
        if file is None:
            continue
        weights += sum(map(weigh, file[0].tensors.items()))
        large = encoder is not None and encoder.kind in ("t5", "umt5")
        ratio = encoder.width / 4096 if encoder is not None and large else 1.0
        compute = max(
            compute, max(_LEAST_TEXT, int(_T5_COMPUTE * ratio)) if large else 0 if encoder is None else _small(encoder)
        )
    model = files["model_path"]
    if whole and model is not None:
        inside = _tensors(model, Role.TEXT, True)
        weights += sum(map(weigh, inside.items()))
    # Of all that is cut into parts, the table of the vocabulary is the largest piece.
    tables = [weigh((n, t)) for f in files.values() if f is not None for n, t in f[0].tensors.items() if "emb" in n]
    return Module("text encoder", device, weights, compute, block=max(tables, default=weights)) if weights else None


def _small(encoder: Part) -> int:
    return _OTHER_TEXT_COMPUTE if encoder.kind == "llm" else 20 * MIB


def _encodes(part: Part, job: SdImgGenParams | SdVidGenParams) -> bool:
    """Whether the VAE sees pictures."""
    if isinstance(job, SdImgGenParams):
        return job.init_image is not None or bool(job.ref_images)
    if part.kind in ("wan-i2v", "wan-i2v-clip", "wan-flf2v", "wan-vace"):
        return True
    return job.init_image is not None or job.end_image is not None or bool(job.control_frames)


def _encode(vae: Module | None, frames: int, larger: float, lever: bool) -> int:
    """The compute buffer of the encoder, from that of the decoder."""
    if vae is None:
        return 0
    encode, decode = (_WAN_ENCODE_LEVER, _WAN21_DECODE_LEVER) if lever else (_WAN_ENCODE, _WAN21_DECODE)
    share = _step(encode, frames) / _step(decode, frames)
    return int(vae.compute * share * larger)


def _step(table: dict[int, int], at: int) -> int:
    """The last value whose key is not above `at`."""
    keys = sorted(table)
    return table[keys[bisect_right(keys, at) - 1]]


def _vae(
    files: dict[str, File | None],
    ctx: SdCtxParams,
    whole: bool,
    weigh: Weigher,
    device: str,
    sizes: tuple[int, int, int],
    tiled: SdTilingParams | None,
    lever: bool,
) -> Module | None:
    """The VAE, or the tiny autoencoder that stands for it."""
    width, height, frames = sizes
    tiny = files["taesd_path"]
    if tiny is not None and not ctx.tae_preview_only:
        weights = sum(map(weigh, tiny[0].tensors.items()))
        known = tiny[1].roles == {Role.TAE} and frames == 1
        return Module("tiny autoencoder", device, weights, width * height * min(frames, 4) * _TAESD_DECODE, known=known)
    file = files["vae_path"] or (files["model_path"] if whole else None)
    vae = file[1].part(Role.VAE) if file is not None else None
    if file is None or vae is None:
        return None
    tensors = _tensors(file, Role.VAE, files["vae_path"] is None)
    if ctx.vae_decode_only:
        tensors = {n: t for n, t in tensors.items() if not n.startswith(("encoder.", "conv1.", "quant_conv."))}
    weights = sum(map(weigh, tensors.items()))
    pixels = width * height
    if tiled is not None:
        scale = 16 if vae.latents == 48 else 8
        sides = [_tile_side(tiled, axis, -(-side // scale)) for axis, side in (("x", width), ("y", height))]
        pixels = math.prod(sides) * scale * scale
    if vae.kind != "wan-vae":
        scores = (pixels // 64) ** 2 * 4
        return Module(
            "VAE", device, weights, max(pixels * _KL_DECODE, scores + pixels * 512), known=vae.kind == "kl-vae"
        )
    table22, table21 = (_WAN22_DECODE_LEVER, _WAN21_DECODE_LEVER) if lever else (_WAN22_DECODE, _WAN21_DECODE)
    table, stock = (table22, 1024) if vae.latents == 48 else (table21, 384)
    first = next((t.shape[0] for n, t in tensors.items() if n.endswith("decoder.conv1.bias")), stock)
    ratio = first / stock
    pool = 0 if device == CPU or lever else int(pixels * _WAN_POOL * ratio)
    return Module("VAE", device, weights, int(pixels * _step(table, frames) * ratio), pool)


def _tile_side(tiling: SdTilingParams, axis: str, latent: int) -> int:
    """Latent pixels of a tile's side, as the engine counts them."""
    relative, size = getattr(tiling, f"rel_size_{axis}"), getattr(tiling, f"tile_size_{axis}")
    overlap = max(0.0, min(0.5, tiling.target_overlap))
    side = size if size >= 4 else _TILE
    if relative > 0:
        share = relative if relative <= 1 else 1 / (relative - relative * overlap + overlap)
        side = round(latent * share)
    return max(min(side, latent), 4)
