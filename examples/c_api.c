/* A video from C11: cc c_api.c -lsdsage (or find_package(sdsage) and sdsage::sdsage in CMake).
 *
 *   c_api DIFFUSION.gguf VAE.safetensors UMT5.gguf OUT.ppm
 *
 * Writes the first frame as a PPM. Every error text comes from sdsage_last_error().
 */
#include <stdio.h>
#include <string.h>

#include "sdsage.h"

static void on_event(const sdsage_event_t * event, void * data) {
    (void)data;
    if (event->kind == SDSAGE_EVENT_STEP) {
        printf("step %d of %d: %.3f s\n", event->step, event->steps, event->seconds);
    }
}

static int write_ppm(const char * path, const sd_image_t * image) {
    FILE * f = fopen(path, "wb");
    if (f == NULL) {
        return 1;
    }
    fprintf(f, "P6\n%u %u\n255\n", image->width, image->height);
    const size_t n       = (size_t)image->width * image->height * image->channel;
    const size_t written = fwrite(image->data, 1, n, f);
    return fclose(f) != 0 || written != n;
}

int main(int argc, char ** argv) {
    if (argc != 5) {
        fprintf(stderr, "usage: %s DIFFUSION VAE T5XXL OUT.ppm\n", argv[0]);
        return 2;
    }
    if (sdsage_abi_version() != SDSAGE_ABI_VERSION) {
        fprintf(stderr, "libsdsage has another ABI than sdsage.h\n");
        return 1;
    }
    sdsage_set_event_callback(on_event, NULL);

    sd_ctx_params_t params;
    sd_ctx_params_init(&params);
    params.diffusion_model_path = argv[1];
    params.vae_path             = argv[2];
    params.t5xxl_path           = argv[3];
    sd_ctx_t * ctx              = new_sd_ctx(&params);
    if (ctx == NULL) {
        fprintf(stderr, "%s\n", sdsage_last_error());
        return 1;
    }

    sd_vid_gen_params_t job;
    sd_vid_gen_params_init(&job);
    job.prompt                     = "a lovely cat";
    job.width                      = 64;
    job.height                     = 64;
    job.video_frames               = 5;
    job.seed                       = 42;
    job.sample_params.sample_steps = 2;
    int count                      = 0;
    sd_image_t * frames            = generate_video(ctx, &job, &count);
    int failed                     = frames == NULL;
    if (failed) {
        fprintf(stderr, "%s\n", sdsage_last_error());
    } else {
        failed = write_ppm(argv[4], &frames[0]);
        printf("%d frames of %ux%u by %s\n", count, frames[0].width, frames[0].height, sdsage_version_name(ctx));
    }
    sdsage_free_images(frames, count);
    free_sd_ctx(ctx);
    return failed;
}
