// Included at the end of stable-diffusion.cpp, where sd_ctx_t and the decoders are known.
// Entry points that upstream's C API lacks; native/sd_cli/src/api.cpp exports them.

namespace sdsage {

static bool latents_fit(sd_ctx_t * ctx, const sd::Tensor<float> & latents, bool video) {
    const int64_t want = ctx->sd->get_latent_channel();
    const auto & shape = latents.shape();
    const size_t axis  = video ? 3 : 2;
    if (shape.size() != axis + 2 || shape[axis] != want) {
        reject("these latents do not belong to this model: " + std::to_string(want) + " channels in dimension " + std::to_string(axis) +
               " of " + std::to_string(axis + 2) + " are needed");
        return false;
    }
    return true;
}

// Latents as the sampler leaves them, in ggml's order (width fastest): [W, H, T, C, 1] for video, [W, H, C, 1] for an image.
sd_image_t * decode_latents(sd_ctx_t * ctx, const float * data, const std::vector<int64_t> & shape, const sd_tiling_params_t & tiling,
                            bool video, int * count) {
    sd::Tensor<float> latents;
    latents.resize(shape);
    std::copy(data, data + latents.numel(), latents.data());
    if (!latents_fit(ctx, latents, video)) {
        return nullptr;
    }
    ctx->sd->vae_tiling_params = tiling;
    if (video) {
        return decode_video_outputs(ctx, latents, count);
    }
    auto decoded = [&] {
        StageScope stage(Stage::decode);
        return ctx->sd->decode_first_stage(latents);
    }();
    if (decoded.empty()) {
        return nullptr;
    }
    *count        = 1;
    auto * images = (sd_image_t *)calloc(1, sizeof(sd_image_t));
    images[0]     = tensor_to_sd_image(decoded);
    return images;
}

bool is_version_name(const std::string & name) { return version_of(name) != VERSION_COUNT; }

const char * version_name(const sd_ctx_t * ctx) { return model_version_to_str[ctx->sd->version]; }

bool has_two_experts(const sd_ctx_t * ctx) { return ctx->sd->high_noise_diffusion_model != nullptr; }

bool can_encode(const sd_ctx_t * ctx) { return !ctx->sd->vae_decode_only; }

// Models that encode a picture even when none was given: upstream aborts if the VAE holds its decoder alone.
bool needs_encoder(const sd_ctx_t * ctx) {
    const std::string desc = ctx->sd->diffusion_model->get_desc();
    const bool image_wan   = desc.find("-I2V") != std::string::npos || desc.find("-FLF2V") != std::string::npos;
    return image_wan || desc.find("-VACE") != std::string::npos;
}

int size_multiple(const sd_ctx_t * ctx) { return ctx->sd->get_vae_scale_factor() * ctx->sd->get_diffusion_model_down_factor(); }

}  // namespace sdsage
