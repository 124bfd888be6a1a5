// Calls each function that takes a path with invalid pointers, each call in its own child process.
// Prints the error of the call or the signal that kills the child.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

typedef intptr_t word;

static char room[1 << 16]; // for results: a stat structure or a path

enum { PATH_WORD = -1000, ROOM_WORD, MODE_WORD, STREAM_WORD, VISIT_WORD };

// Arguments of a function, and 1 if it returns a pointer.
static const struct function {
    const char *name;
    int returns_pointer;
    word arguments[6];
} functions[] = {
#define PATH PATH_WORD
#define INTO ROOM_WORD
    {"open", 0, {PATH, O_RDONLY}},
    {"open64", 0, {PATH, O_RDONLY}},
    {"openat", 0, {AT_FDCWD, PATH, O_RDONLY}},
    {"openat64", 0, {AT_FDCWD, PATH, O_RDONLY}},
    {"__open_2", 0, {PATH, O_RDONLY}},
    {"__open64_2", 0, {PATH, O_RDONLY}},
    {"__openat_2", 0, {AT_FDCWD, PATH, O_RDONLY}},
    {"__openat64_2", 0, {AT_FDCWD, PATH, O_RDONLY}},
    {"fopen", 1, {PATH, MODE_WORD}},
    {"fopen64", 1, {PATH, MODE_WORD}},
    {"stat", 0, {PATH, INTO}},
    {"stat64", 0, {PATH, INTO}},
    {"lstat", 0, {PATH, INTO}},
    {"lstat64", 0, {PATH, INTO}},
    {"fstatat", 0, {AT_FDCWD, PATH, INTO}},
    {"fstatat64", 0, {AT_FDCWD, PATH, INTO}},
    {"statx", 0, {AT_FDCWD, PATH, 0, 0x7ff, INTO}},
    {"__xstat", 0, {1, PATH, INTO}},
    {"__xstat64", 0, {1, PATH, INTO}},
    {"__lxstat", 0, {1, PATH, INTO}},
    {"__lxstat64", 0, {1, PATH, INTO}},
    {"__fxstatat", 0, {1, AT_FDCWD, PATH, INTO}},
    {"__fxstatat64", 0, {1, AT_FDCWD, PATH, INTO}},
    {"access", 0, {PATH, F_OK}},
    {"faccessat", 0, {AT_FDCWD, PATH, F_OK}},
    {"euidaccess", 0, {PATH, F_OK}},
    {"eaccess", 0, {PATH, F_OK}},
    {"opendir", 1, {PATH}},
    {"scandir", 0, {PATH, INTO}},
    {"scandir64", 0, {PATH, INTO}},
    {"readlink", 0, {PATH, INTO, sizeof room}},
    {"readlinkat", 0, {AT_FDCWD, PATH, INTO, sizeof room}},
    {"__readlink_chk", 0, {PATH, INTO, sizeof room, sizeof room}},
    {"realpath", 1, {PATH, INTO}},
    {"__realpath_chk", 1, {PATH, INTO, sizeof room}},
    {"canonicalize_file_name", 1, {PATH}},
    {"pathconf", 0, {PATH, 0}},
    {"__readlinkat_chk", 0, {AT_FDCWD, PATH, INTO, sizeof room, sizeof room}},
    {"freopen", 1, {PATH, MODE_WORD, STREAM_WORD}},
    {"freopen64", 1, {PATH, MODE_WORD, STREAM_WORD}},
    {"scandirat", 0, {AT_FDCWD, PATH, INTO}},
    {"scandirat64", 0, {AT_FDCWD, PATH, INTO}},
    {"chdir", 0, {PATH}},
    {"statfs", 0, {PATH, INTO}},
    {"statfs64", 0, {PATH, INTO}},
    {"statvfs", 0, {PATH, INTO}},
    {"statvfs64", 0, {PATH, INTO}},
    {"getxattr", 0, {PATH, MODE_WORD, INTO, sizeof room}},
    {"lgetxattr", 0, {PATH, MODE_WORD, INTO, sizeof room}},
    {"listxattr", 0, {PATH, INTO, sizeof room}},
    {"llistxattr", 0, {PATH, INTO, sizeof room}},
    {"inotify_add_watch", 0, {-1, PATH, 1}},
    {"posix_spawn_file_actions_addopen", 0, {INTO, 0, PATH, O_RDONLY}},
    {"posix_spawn_file_actions_addchdir_np", 0, {INTO, PATH}},
    {"glob", 0, {PATH, 0, 0, INTO}},
    {"glob64", 0, {PATH, 0, 0, INTO}},
    {"ftw", 0, {PATH, VISIT_WORD, 8}},
    {"ftw64", 0, {PATH, VISIT_WORD, 8}},
    {"nftw", 0, {PATH, VISIT_WORD, 8}},
    {"nftw64", 0, {PATH, VISIT_WORD, 8}},
};

static int visit(void)
{
    return 0;
}

static word called(const struct function *f, const char *path)
{
    word (*function)(word, word, word, word, word, word);
    word a[6];
    *(void **)&function = dlsym(RTLD_DEFAULT, f->name);
    if (!function) {
        printf("%s is missing\n", f->name);
        exit(1);
    }
    for (int n = 0; n < 6; n++)
        a[n] = f->arguments[n] == PATH_WORD   ? (word)path
               : f->arguments[n] == ROOM_WORD ? (word)room
               : f->arguments[n] == MODE_WORD ? (word) "r"
               : f->arguments[n] == STREAM_WORD ? (word)stdin
               : f->arguments[n] == VISIT_WORD ? (word)visit
                                               : f->arguments[n];
    errno = 0;
    word result = function(a[0], a[1], a[2], a[3], a[4], a[5]);
    int failed = f->returns_pointer ? result == 0 : (int)result == -1;
    return failed ? errno : 0;
}

// Prints the error of a call, or the signal that kills the child inside the C library.
static void report(const struct function *f, const char *kind, const char *path)
{
    fflush(stdout);
    pid_t child = fork();
    if (child == 0)
        _exit(called(f, path));
    int status;
    if (child < 0 || waitpid(child, &status, 0) != child)
        abort();
    if (WIFSIGNALED(status))
        printf("%s, %s: signal %d\n", f->name, kind, WTERMSIG(status));
    else
        printf("%s, %s: %s\n", f->name, kind, strerrorname_np(WEXITSTATUS(status)));
}

// Passes a path that starts in one page and ends in the next.
static int devices(long page)
{
    static const char path[] = "/sys/class/infiniband";
    char *pages = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED)
        return 1;
    for (size_t before = 1; before < sizeof path; before++) {
        if (access(strcpy(pages + page - before, path), F_OK)) {
            printf("%zu bytes before the page: %s\n", before, strerrorname_np(errno));
            return 1;
        }
    }
    puts("found");
    return 0;
}

// Refuses madvise() advice that kernels before 5.14 lack, in this process from now on.
static int older(void)
{
    enum { FIRST_UNKNOWN = 22 };
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_madvise, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[2])),
        BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, FIRST_UNKNOWN, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EINVAL),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof filter / sizeof *filter, filter};
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) ||
           prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program);
}

// An interposed function keeps the message of a failed dlopen(3), even at its first call.
static int error(void)
{
    FILE *open = dlopen("/nonexistent/library.so", RTLD_NOW) ? NULL : fopen("/dev/null", "r");
    puts(open && dlerror() ? "kept" : "lost");
    return 0;
}

int main(int words, char **word)
{
    if (words > 1 && !strcmp(word[1], "error"))
        return error();
    const long page = sysconf(_SC_PAGESIZE);
    const size_t count = sizeof functions / sizeof *functions;
    const struct rlimit no_core = {0, 0};
    setrlimit(RLIMIT_CORE, &no_core);
    if (words > 2 && !strcmp(word[2], "older") && older())
        return 1;
    if (words > 1 && !strcmp(word[1], "devices"))
        return devices(page);
    char *pages = mmap(NULL, 4 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED || munmap(pages + page, page) || mprotect(pages + 3 * page, page, 0))
        return 1;
    char *gone = pages + page, *barred = pages + 3 * page;
    for (size_t n = 0; n < count; n++) {
        const struct function *f = &functions[n];
        report(f, "null", NULL);
        report(f, "in the first page", (const char *)16);
        report(f, "unmapped", gone + 100);
        report(f, "beyond all addresses", (const char *)-2);
        report(f, "without a right to it", barred);
        for (int bars = 0; bars < 2; bars++) {
            char *end = bars ? barred : gone;
            const char *kind = bars ? "runs into a barred page" : "runs into nothing";
            // Paths that the end of the page cuts in the prefix, after it, or after its slash.
            static const char *const cut[] = {"/", "/sys/class/inf", "/sys/class/infiniband",
                                              "/sys/class/infiniband/x", "/dev/infiniband/", "/tmp"};
            for (size_t c = 0; c < sizeof cut / sizeof *cut; c++) {
                memcpy(end - strlen(cut[c]), cut[c], strlen(cut[c]));
                report(f, kind, end - strlen(cut[c]));
            }
            // A whole path, whose last byte is the last one of the page.
            memcpy(end - 6, "/none", 6);
            report(f, "ends with its page", end - 6);
        }
        char *whole = malloc(3 * 4096);
        memset(whole, 'x', 3 * 4096);
        memcpy(whole, "/sys/class/infiniband/", 22);
        whole[3 * 4096 - 1] = 0;
        report(f, "too long", whole);
        free(whole);
    }
    return 0;
}
