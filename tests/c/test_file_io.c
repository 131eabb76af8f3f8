/* model/file.c: files of the wrong size, files that change while they load, paths that are no
 * files. */
#include "backend/backend.h"
#include "base/memory.h"
#include "load_check.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>
#include <sys/wait.h>

/* ---- other sizes ---- */

/* The header's file_size and checksum as they would be if the file were meant to have this size. */
static void agree_to_size(unsigned char *bytes, size_t size, size_t meta_size)
{
    tiny_put_u64(bytes + 16, size);
    if (size >= meta_size)
        tiny_put_u32(bytes + 12, crc32_update(0, bytes + 16, meta_size - 16));
}

TEST(other_sizes_are_refused)
{
    tiny_spec spec = TINY_SPEC;
    tiny_file *file = tiny_make(&spec);
    tl_model *model;
    for (size_t size = 0; size < file->size; size += size < file->meta_size ? 1 : 61) {
        CHECK_STATUS(tiny_load_bytes(&model, file->bytes, size, NULL), TL_STATUS_FORMAT);
        CHECK(model == NULL);
        agree_to_size(file->bytes, size, file->meta_size);
        CHECK_STATUS(tiny_load_bytes(&model, file->bytes, size, NULL), TL_STATUS_FORMAT);
        agree_to_size(file->bytes, file->size, file->meta_size);
    }
    CHECK_STATUS(tiny_load_bytes(&model, file->bytes, file->size - 1, NULL), TL_STATUS_FORMAT);
    CHECK_STR_HAS(tl_last_error(), "cut");
    unsigned char *longer = calloc(1, file->size + 64);
    memcpy(longer, file->bytes, file->size);
    CHECK_STATUS(tiny_load_bytes(&model, longer, file->size + 1, NULL), TL_STATUS_FORMAT);
    /* with a header that agrees, it is the tensors that do not */
    agree_to_size(longer, file->size + 64, file->meta_size);
    CHECK_STATUS(tiny_load_bytes(&model, longer, file->size + 64, NULL), TL_STATUS_FORMAT);
    CHECK_STR_HAS(tl_last_error(), "the tensors end");
    free(longer);
    tiny_free(file);
}

/* The shipped model in memory, cut at every 4 KiB; its header agrees to every eighth cut. */
TEST(the_shipped_model_cut_anywhere)
{
    int shipped = open(test_model_path(), O_RDONLY);
    struct stat info;
    REQUIRE(shipped >= 0 && fstat(shipped, &info) == 0);
    size_t size = (size_t)info.st_size;
    unsigned char *bytes = malloc(size);
    REQUIRE(pread(shipped, bytes, size, 0) == (ssize_t)size);
    close(shipped);
    uint64_t meta_size;
    memcpy(&meta_size, bytes + 24, sizeof meta_size);
    char path[64];
    int fd = tiny_open(path, bytes, size);
    REQUIRE(fd >= 0);
    tl_model *model;
    for (size_t cut = (size - 1) / 4096 * 4096, n = 0; cut > 0; cut -= 4096, n++) {
        REQUIRE(ftruncate(fd, (off_t)cut) == 0);
        bool held = CHECK_STATUS(tl_model_load(&model, path, NULL), TL_STATUS_FORMAT);
        if (n % 8 == 0 && cut >= meta_size) {
            agree_to_size(bytes, cut, meta_size);
            REQUIRE(pwrite(fd, bytes, 64, 0) == 64);
            held &= CHECK_STATUS(tl_model_load(&model, path, NULL), TL_STATUS_FORMAT);
            CHECK_STR_HAS(tl_last_error(), "outside the file");
        }
        if (!held)
            break;
    }
    close(fd);
    free(bytes);
}

/* ---- files that change while they are read ---- */

/* What tl_model_load does after it opened the file, on two lanes. */
static tl_status pack_weights(model_file *file)
{
    model_weights weights;
    backend_model *model;
    tl_status status = model_weights_bind(&weights, file);
    if (status != TL_STATUS_OK)
        return status;
    const backend_options options = {.threads = 2, .kv_mode = TL_KV_MODE_FP16};
    status = cpu_backend.model_create(&model, file, &weights, &options);
    CHECK_EQ(status == TL_STATUS_OK, model != NULL);
    cpu_backend.model_destroy(model);
    model_weights_clear(&weights);
    return status;
}

TEST(a_file_cut_between_open_and_read)
{
    int64_t live = mem_live();
    for (size_t s = 0; s < TINY_N_SPECS; s++) {
        tiny_file *tiny = tiny_make(&tiny_specs[s]);
        for (size_t t = 0; t < tiny->n_tensors; t++) {
            const tiny_tensor *tensor = &tiny->tensors[t];
            const size_t cuts[] = {tensor->offset, tensor->offset + tensor->size - 1};
            for (int i = 0; i < 2; i++) {
                char path[64], part[96];
                int fd = tiny_open(path, tiny->bytes, tiny->size);
                model_file file;
                REQUIRE_OK(model_file_open(&file, path, true));
                REQUIRE(ftruncate(fd, (off_t)cuts[i]) == 0);
                CHECK_STATUS(pack_weights(&file), TL_STATUS_IO);
                snprintf(part, sizeof part, "%s: cannot read", path);
                CHECK_STR_HAS(tl_last_error(), part);
                CHECK_STR_HAS(tl_last_error(), "the file ends");
                char byte;
                CHECK_STATUS(file_tensor_read(&file.tensors[t], &byte, tensor->size - 1, 1),
                             TL_STATUS_IO);
                snprintf(part, sizeof part, "offset %zu: got 0", tensor->offset + tensor->size - 1);
                CHECK_STR_HAS(tl_last_error(), tensor->name);
                CHECK_STR_HAS(tl_last_error(), part);
                model_file_close(&file);
                close(fd);
                CHECK_EQ(mem_live(), live);
            }
        }
        tiny_free(tiny);
    }
}

TEST(a_read_that_the_system_refuses)
{
    tiny_spec spec = TINY_SPEC;
    tiny_file *tiny = tiny_make(&spec);
    char path[64];
    int fd = tiny_open(path, tiny->bytes, tiny->size);
    model_file file;
    REQUIRE_OK(model_file_open(&file, path, false));
    REQUIRE(dup3(open("/dev/null", O_WRONLY), file.fd, O_CLOEXEC) == file.fd);
    CHECK_STATUS(pack_weights(&file), TL_STATUS_IO);
    CHECK_STR_HAS(tl_last_error(), strerror(EBADF));
    model_file_close(&file);
    close(fd);
    tiny_free(tiny);
}

typedef struct rewriter {
    int fd;
    const tiny_file *file;
    atomic_bool stop;
} rewriter;

static void *cut_and_restore(void *arg)
{
    rewriter *r = arg;
    for (uint64_t i = 0; !atomic_load(&r->stop); i++) {
        CHECK(ftruncate(r->fd, (off_t)(random_uniform(5, i) * (double)r->file->size)) == 0);
        CHECK(pwrite(r->fd, r->file->bytes, r->file->size, 0) == (ssize_t)r->file->size);
    }
    return NULL;
}

/* Whatever a load meets, it ends with a model or a sentence. */
TEST(a_file_that_is_cut_and_restored_while_it_loads)
{
    rewriter r = {.file = tiny_make(&tiny_specs[TINY_LARGE])};
    char path[64];
    r.fd = tiny_open(path, r.file->bytes, r.file->size);
    tl_model_options verifying = tiny_options(1);
    verifying.verify = 1;
    pthread_t thread;
    REQUIRE(pthread_create(&thread, NULL, cut_and_restore, &r) == 0);
    int64_t live = mem_live();
    for (int i = 0; i < 500; i++) {
        tl_model *model;
        tl_status status = tl_model_load(&model, path, i % 2 ? &verifying : NULL);
        CHECK(status == TL_STATUS_OK || status == TL_STATUS_IO || status == TL_STATUS_FORMAT);
        CHECK_EQ(status == TL_STATUS_OK, model != NULL);
        tl_model_release(model);
        CHECK_EQ(mem_live(), live);
    }
    atomic_store(&r.stop, true);
    pthread_join(thread, NULL);
    close(r.fd);
    tiny_free((tiny_file *)r.file);
}

/* ---- paths ---- */

static tl_status load_path(const char *path)
{
    tl_model *model;
    tl_status status = tl_model_load(&model, path, NULL);
    tl_model_release(model);
    return status;
}

TEST(paths_that_cannot_be_read)
{
    CHECK_STATUS(load_path("no/such/file.tinyloop"), TL_STATUS_IO);
    CHECK_STR_HAS(tl_last_error(), "no/such/file.tinyloop");
    CHECK_STATUS(load_path(""), TL_STATUS_IO);
    CHECK_STATUS(load_path("/"), TL_STATUS_IO);
    CHECK_STR_HAS(tl_last_error(), "regular");
    CHECK_STATUS(load_path("/dev/null"), TL_STATUS_IO);
    char path[64];
    int fd = tiny_open(path, "", 0);
    CHECK_STATUS(load_path(path), TL_STATUS_FORMAT);
    CHECK_STR_HAS(tl_last_error(), "0 bytes");
    char below[80];
    snprintf(below, sizeof below, "%s/x", path);
    CHECK_STATUS(load_path(below), TL_STATUS_IO);
    close(fd);
    char longest[5000];
    memset(longest, 'a', sizeof longest - 1);
    longest[sizeof longest - 1] = '\0';
    CHECK_STATUS(load_path(longest), TL_STATUS_IO);
    CHECK(*tl_last_error() != '\0');
}

/* Only someone without special rights is kept out of a file; a child gives them up. */
TEST(a_file_without_read_permission)
{
    char folder[] = P_tmpdir "/tinyloop-test-XXXXXX", path[80];
    REQUIRE(mkdtemp(folder) != NULL);
    snprintf(path, sizeof path, "%s/model", folder);
    FILE *stream = fopen(path, "w");
    REQUIRE(stream != NULL);
    fclose(stream);
    chmod(folder, 0755);
    chmod(path, 0);
    pid_t child = fork();
    if (child == 0) {
        bool dropped = geteuid() != 0 || (setgid(65534) == 0 && setuid(65534) == 0);
        _exit(dropped ? load_path(path) : 99);
    }
    int status = -1;
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == TL_STATUS_IO);
    unlink(path);
    rmdir(folder);
}

/* A pipe that nobody writes to must be refused, not waited for. */
TEST(a_named_pipe_is_refused_at_once)
{
    char folder[] = P_tmpdir "/tinyloop-test-XXXXXX", path[80];
    REQUIRE(mkdtemp(folder) != NULL);
    snprintf(path, sizeof path, "%s/pipe", folder);
    REQUIRE(mkfifo(path, 0600) == 0);
    pid_t child = fork();
    if (child == 0) {
        alarm(5);
        _exit(load_path(path));
    }
    int status = -1;
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == TL_STATUS_IO);
    unlink(path);
    rmdir(folder);
}
