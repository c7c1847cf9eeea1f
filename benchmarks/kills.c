/* Calls on files under one folder are counted, and the process dies, as by kill -9, at one point of one of them.

   To be loaded before libc (LD_PRELOAD). Each call has points: before it, after it, and, where it writes, when half is
   written. Reads have none, for they change nothing; nor has what stdio does within libc, which the package does not
   use for what it must keep. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static char folder[PATH_MAX];
static size_t length; /* 0: nothing is counted */
static long calls, points, fatal;

void kills_arm(const char *path, long point) {
    length = strlen(strncpy(folder, path, sizeof folder - 1));
    calls = points = 0;
    fatal = point;
}
long kills_calls(void) { return calls; }
long kills_points(void) { return points; }

static void point(void) {
    if (points++ == fatal) {
        kill(getpid(), SIGKILL);
        for (;;) pause();
    }
}

static int within(const char *path) {
    return !strncmp(path, folder, length) && (path[length] == '/' || !path[length]);
}

static int of_file(int descriptor) {
    if (!length) return 0;
    char link[64], path[PATH_MAX];
    if (descriptor == AT_FDCWD) strcpy(link, "/proc/self/cwd");
    else snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size < 0) return 0;
    path[size] = 0;
    return within(path);
}

static int of_path(int place, const char *path) {
    if (!length || !path) return 0;
    return *path == '/' ? within(path) : of_file(place);
}

#define REAL(name) static __typeof__(name) *real; if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

#define CALL(type, name, counts, arguments, ...) \
    type name(__VA_ARGS__) { \
        REAL(name); \
        if (!(counts)) return real arguments; \
        calls++; point(); \
        type found = real arguments; \
        int problem = errno; \
        point(); \
        errno = problem; \
        return found; \
    }

#define WRITE(name, half, arguments, ...) \
    ssize_t name(int file, const void *data, size_t size, ##__VA_ARGS__) { \
        REAL(name); \
        if (!of_file(file)) return real arguments; \
        calls++; point(); \
        if (points == fatal && size > 1 && real half < 0) return -1; \
        point(); \
        ssize_t found = real arguments; \
        int problem = errno; \
        point(); \
        errno = problem; \
        return found; \
    }

#define OPEN(name, place, arguments, ...) \
    int name(__VA_ARGS__, int flags, ...) { \
        REAL(name); \
        va_list rest; va_start(rest, flags); \
        int mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, int) : 0; \
        va_end(rest); \
        if (!of_path(place, path)) return real arguments; \
        calls++; point(); \
        int found = real arguments, problem = errno; \
        point(); \
        errno = problem; \
        return found; \
    }

OPEN(open, AT_FDCWD, (path, flags, mode), const char *path)
OPEN(open64, AT_FDCWD, (path, flags, mode), const char *path)
OPEN(openat, at, (at, path, flags, mode), int at, const char *path)
OPEN(openat64, at, (at, path, flags, mode), int at, const char *path)
WRITE(write, (file, data, size / 2), (file, data, size))
WRITE(pwrite, (file, data, size / 2, place), (file, data, size, place), off_t place)
WRITE(pwrite64, (file, data, size / 2, place), (file, data, size, place), off64_t place)
CALL(ssize_t, writev, of_file(file), (file, parts, count), int file, const struct iovec *parts, int count)
CALL(int, fsync, of_file(file), (file), int file)
CALL(int, fdatasync, of_file(file), (file), int file)
CALL(int, ftruncate, of_file(file), (file, size), int file, off_t size)
CALL(int, ftruncate64, of_file(file), (file, size), int file, off64_t size)
CALL(int, rename, of_path(AT_FDCWD, new), (old, new), const char *old, const char *new)
CALL(int, renameat, of_path(to, new), (at, old, to, new), int at, const char *old, int to, const char *new)
CALL(int, link, of_path(AT_FDCWD, new), (old, new), const char *old, const char *new)
CALL(int, symlink, of_path(AT_FDCWD, new), (old, new), const char *old, const char *new)
CALL(int, unlink, of_path(AT_FDCWD, path), (path), const char *path)
CALL(int, unlinkat, of_path(at, path), (at, path, flags), int at, const char *path, int flags)
CALL(int, rmdir, of_path(AT_FDCWD, path), (path), const char *path)
CALL(int, mkdir, of_path(AT_FDCWD, path), (path, mode), const char *path, mode_t mode)
CALL(int, mkdirat, of_path(at, path), (at, path, mode), int at, const char *path, mode_t mode)
CALL(int, chmod, of_path(AT_FDCWD, path), (path, mode), const char *path, mode_t mode)
CALL(int, fchmod, of_file(file), (file, mode), int file, mode_t mode)
