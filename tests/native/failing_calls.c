/* Calls to the system of which one fails: preloaded into a process (LD_PRELOAD), silent until `failing_calls_arm`.
 *
 * Counted are calls of one name that concern a folder (by path, or by what a descriptor is of), and those of mmap, fork,
 * socket and connect wherever they go, but those mmap by which Python gets memory for objects and frames in a thread that is not the
 * first: one that begins without never says that it has begun, and who started it waits for ever
 * (https://github.com/python/cpython/issues/140746). The k-th fails with a given errno; with `lasting`, so do those after
 * it.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

static char armed_call[32], armed_folder[PATH_MAX];
static int armed_errno, armed_last, armed_lasting;
static atomic_int counted, armed;

void failing_calls_arm(const char *call, int last, int number, int lasting, const char *folder) {
    snprintf(armed_call, sizeof armed_call, "%s", call);
    snprintf(armed_folder, sizeof armed_folder, "%s", folder);
    armed_last = last, armed_errno = number, armed_lasting = lasting;
    atomic_store(&counted, 0);
    atomic_store(&armed, 1);
}

int failing_calls_counted(void) { return atomic_load(&counted); }

static int fails(const char *call) {
    if (!atomic_load(&armed) || strcmp(call, armed_call)) return 0;
    int number = atomic_fetch_add(&counted, 1) + 1;
    if (number != armed_last && !(armed_lasting && number > armed_last)) return 0;
    errno = armed_errno;
    return 1;
}

static int within(const char *path) { return path && !strncmp(path, armed_folder, strlen(armed_folder)); }

/* obmalloc takes memory in pieces of the first size, the frames of a thread in pieces of the second. */
#define ARENA ((size_t)1 << 20)
#define FRAMES ((size_t)16 << 10)

static int is_ours(size_t size) { return (size != ARENA && size != FRAMES) || gettid() == getpid(); }

static int concerns(int descriptor) {
    if (!atomic_load(&armed)) return 0;
    int before = errno;
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    errno = before;
    if (length < 0) return 0;
    path[length] = 0;
    return within(path);
}

#define REAL(name) \
    static __typeof__(&name) real; \
    if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

#define OPEN(name, parameters, path, arguments) \
    int name parameters { \
        REAL(name); \
        mode_t mode = 0; \
        if (flags & (O_CREAT | O_TMPFILE)) { \
            va_list more; \
            va_start(more, flags); \
            mode = va_arg(more, mode_t); \
            va_end(more); \
        } \
        if (within(path) && fails("open")) return -1; \
        return real arguments; \
    }

OPEN(open, (const char *path, int flags, ...), path, (path, flags, mode))
OPEN(open64, (const char *path, int flags, ...), path, (path, flags, mode))
OPEN(openat, (int folder, const char *path, int flags, ...), path, (folder, path, flags, mode))
OPEN(openat64, (int folder, const char *path, int flags, ...), path, (folder, path, flags, mode))

#define CALL(result, name, counted_as, condition, parameters, arguments) \
    result name parameters { \
        REAL(name); \
        if ((condition) && fails(counted_as)) return (result)-1; \
        return real arguments; \
    }

CALL(ssize_t, write, "write", concerns(fd), (int fd, const void *data, size_t size), (fd, data, size))
CALL(ssize_t, pwrite, "write", concerns(fd), (int fd, const void *data, size_t size, off_t at), (fd, data, size, at))
CALL(ssize_t, pwrite64, "write", concerns(fd), (int fd, const void *data, size_t size, off64_t at), (fd, data, size, at))
CALL(int, fsync, "fsync", concerns(fd), (int fd), (fd))
CALL(int, fdatasync, "fsync", concerns(fd), (int fd), (fd))
CALL(int, rename, "rename", within(to), (const char *from, const char *to), (from, to))
CALL(int, mkdir, "mkdir", within(path), (const char *path, mode_t mode), (path, mode))
CALL(int, unlink, "unlink", within(path), (const char *path), (path))
CALL(int, ftruncate, "truncate", concerns(fd), (int fd, off_t size), (fd, size))
CALL(int, ftruncate64, "truncate", concerns(fd), (int fd, off64_t size), (fd, size))
CALL(int, socket, "socket", 1, (int domain, int type, int protocol), (domain, type, protocol))
CALL(int, connect, "connect", 1, (int fd, const struct sockaddr *to, socklen_t size), (fd, to, size))
CALL(pid_t, fork, "fork", 1, (void), ())
CALL(void *, mmap, "mmap", is_ours(size), (void *at, size_t size, int how, int flags, int fd, off_t from), (at, size, how, flags, fd, from))
CALL(void *, mmap64, "mmap", is_ours(size), (void *at, size_t size, int how, int flags, int fd, off64_t from), (at, size, how, flags, fd, from))

/* A wrapper cannot return into the frame that vfork's child used: fork does the same, slower. */
pid_t vfork(void) { return fork(); }
