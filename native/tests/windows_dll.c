/* sdsage.dll from C, in a program without the UTF-8 manifest: as Python would load it.
 *
 *   windows_dll DIFFUSION.gguf VAE.safetensors UMT5.gguf PROMPT OUT.rgb
 *
 * Prints sdsage_build_info; writes the frames of a video, 8 bits for red, green and blue; starts the same job again and cancels it
 * at its first step. The code page of this program is the system's, so names go in as UTF-8 and only the library turns them into
 * what Windows opens.
 */
#include <stdio.h>
#include <stdlib.h>
#include <windows.h>

#include "sdsage.h"

static int cancel_at_first_step = 0;

static void on_event(const sdsage_event_t * event, void * data) {
    (void)data;
    if (cancel_at_first_step && event->kind == SDSAGE_EVENT_STEP) {
        sdsage_cancel();
    }
}

static void on_progress(int step, int steps, float seconds, void * data) { (void)step, (void)steps, (void)seconds, (void)data; }

static const char * utf8(const wchar_t * wide) {
    const int size = WideCharToMultiByte(CP_UTF8, 0, wide, -1, NULL, 0, NULL, NULL);
    char * text    = malloc((size_t)size);
    if (text != NULL) {
        WideCharToMultiByte(CP_UTF8, 0, wide, -1, text, size, NULL, NULL);
    }
    return text;
}

static int write_frames(const wchar_t * path, const sd_image_t * frames, int count) {
    FILE * f = _wfopen(path, L"wb");
    if (f == NULL) {
        return 1;
    }
    int failed = 0;
    for (int i = 0; i < count; i++) {
        const size_t size = (size_t)frames[i].width * frames[i].height * frames[i].channel;
        failed |= fwrite(frames[i].data, 1, size, f) != size;
    }
    return fclose(f) != 0 || failed;
}

int wmain(int argc, wchar_t ** argv) {
    if (argc != 6) {
        fprintf(stderr, "usage: windows_dll DIFFUSION VAE T5XXL PROMPT OUT.rgb\n");
        return 2;
    }
    if (GetACP() == CP_UTF8) {
        fprintf(stderr, "this program's code page is UTF-8: it would not see whether the library turns names into wide ones\n");
        return 2;
    }
    if (sdsage_abi_version() != SDSAGE_ABI_VERSION) {
        fprintf(stderr, "sdsage.dll has another ABI than sdsage.h\n");
        return 1;
    }
    printf("%s\n", sdsage_build_info());
    sdsage_set_event_callback(on_event, NULL);
    sd_set_progress_callback(on_progress, NULL); /* else the engine draws a bar on stdout */

    sd_ctx_params_t params;
    sd_ctx_params_init(&params);
    params.n_threads               = 1;
    params.free_params_immediately = false; /* two jobs */
    params.diffusion_model_path    = utf8(argv[1]);
    params.vae_path                = utf8(argv[2]);
    params.t5xxl_path              = utf8(argv[3]);
    sd_ctx_t * ctx                 = new_sd_ctx(&params);
    if (ctx == NULL) {
        fprintf(stderr, "%s\n", sdsage_last_error());
        return 1;
    }

    sd_vid_gen_params_t job;
    sd_vid_gen_params_init(&job);
    job.prompt                         = utf8(argv[4]);
    job.width                          = 32;
    job.height                         = 32;
    job.video_frames                   = 5;
    job.seed                           = 7;
    job.sample_params.sample_steps     = 2;
    job.sample_params.guidance.txt_cfg = 3.5f;
    int count                          = 0;
    sd_image_t * frames                = generate_video(ctx, &job, &count);
    if (frames == NULL) {
        fprintf(stderr, "%s\n", sdsage_last_error());
        return 1;
    }
    int failed = write_frames(argv[5], frames, count);
    printf("%d frames of %ux%u by %s\n", count, frames[0].width, frames[0].height, sdsage_version_name(ctx));
    sdsage_free_images(frames, count);

    cancel_at_first_step = 1;
    frames               = generate_video(ctx, &job, &count);
    failed |= frames != NULL || sdsage_last_status() != SDSAGE_CANCELLED;
    printf("cancelled: %s\n", sdsage_last_error());
    free_sd_ctx(ctx);
    return failed;
}
