// Looks for RDMA devices with functions of the C library that keep a working directory, return
// paths or walk a tree. Prints "done" if they behave as in the kernel's /sys.

#include "refusals.h"
#include <dirent.h>
#include <fcntl.h>
#include <fts.h>
#include <ftw.h>
#include <glob.h>
#include <limits.h>
#include <pthread.h>
#include <spawn.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <sys/xattr.h>

#define FOLDER "/sys/class/infiniband"
#define DEVICE "/sys/devices/rnicd/rnicd1/infiniband/rnicd1"

char *__getcwd_chk(char *to, size_t size, size_t room);
char *__getwd_chk(char *to, size_t room);

static int is_device(char *path)
{
    return path && !strcmp(path, DEVICE);
}

static void working_directory(void)
{
    char to[PATH_MAX];
    CHECK(chdir(FOLDER "/rnicd1") == 0);
    CHECK(is_device(getcwd(to, sizeof to)) && is_device(__getcwd_chk(to, sizeof to, sizeof to)));
    CHECK(is_device(__getwd_chk(to, sizeof to)));
    char *made = getcwd(NULL, 0);
    CHECK(is_device(made));
    free(made);
    unsetenv("PWD");
    made = get_current_dir_name();
    CHECK(is_device(made));
    free(made);
    CHECK(is_device(realpath(".", to)));
    CHECK(access("node_type", R_OK) == 0 && access("../../numa_node", R_OK) == 0);
    CHECK(access("../../../../../class/infiniband/rnicd1", R_OK) == 0);
    CHECK(access("../../../../../class/net", R_OK) == 0);
    // A buffer that is too short for the whole path in the tree.
    memset(to, 'x', sizeof to);
    CHECK(readlink("/proc/self/cwd", to, 12) == 12 && !memcmp(to, "/sys/devicesx", 13));
    CHECK(readlink("/proc/self/cwd", to, sizeof to) == strlen(DEVICE));
    int folder = open(FOLDER, O_RDONLY | O_DIRECTORY);
    CHECK(chdir("/") == 0 && fchdir(folder) == 0);
    CHECK(!strcmp(getcwd(to, sizeof to), FOLDER) && access("rnicd1/node_type", R_OK) == 0);
    CHECK(faccessat(folder, "rnicd1/node_type", R_OK, 0) == 0);
    CHECK(faccessat(folder, "../infiniband_verbs/abi_version", R_OK, 0) == 0);
    CHECK(faccessat(folder, "../net/lo", R_OK, 0) == 0);
    close(folder);
    CHECK(chdir(FOLDER "/..") == 0 && !strcmp(getcwd(to, sizeof to), "/sys/class"));
    CHECK(access("infiniband/rnicd1", R_OK) == 0 && access("./infiniband", R_OK) == 0);
    folder = open("/sys", O_PATH | O_DIRECTORY);
    CHECK(faccessat(folder, "class/infiniband/rnicd1/ports", R_OK, 0) == 0);
    CHECK(faccessat(folder, "class/net/lo", R_OK, 0) == 0);
    close(folder);
    // The same relative names in another folder.
    char other[] = "/tmp/rnic-sysfs-XXXXXX";
    CHECK(mkdtemp(other) && chdir(other) == 0 && mkdir("infiniband", 0755) == 0);
    CHECK(access("infiniband", R_OK) == 0 && access("infiniband/rnicd1", R_OK) == -1);
    CHECK(access("../sys/class/infiniband", R_OK) == -1 && access("..", R_OK) == 0);
    CHECK(rmdir("infiniband") == 0 && chdir("/") == 0 && rmdir(other) == 0);
    CHECK(access("sys/class/infiniband/rnicd1", R_OK) == 0);
    CHECK(access("tmp/../sys", R_OK) == 0 && !strcmp(getcwd(to, sizeof to), "/"));
    CHECK(getcwd(to, 1) == NULL && errno == ERANGE);
}

static int visits, visited_device, nested;

static int visit(const char *path, const struct stat *found, int kind, struct FTW *at)
{
    visits++;
    visited_device += !strcmp(path, FOLDER "/rnicd1") && !strcmp(path + at->base, "rnicd1") &&
                      at->level == 1 && found;
    return strncmp(path, FOLDER, strlen(FOLDER)) ? 99 : 0;
}

static int old_visit(const char *path, const struct stat *found, int kind)
{
    visits++;
    return !strcmp(path, FOLDER "/rnicd1") && kind == FTW_D ? 7 : 0;
}

static int nested_visit(const char *path, const struct stat *found, int kind, struct FTW *at)
{
    nested += !strncmp(path, FOLDER, strlen(FOLDER));
    return nftw(FOLDER, visit, 4, FTW_PHYS);
}

static void walks(void)
{
    CHECK(nftw(FOLDER, visit, 8, FTW_PHYS) == 0 && visits == 2 && visited_device == 1);
    CHECK(nftw64(FOLDER "/", (void *)visit, 8, FTW_PHYS | FTW_CHDIR) == 0 && visits == 4);
    CHECK(chdir("/") == 0);
    CHECK(ftw(FOLDER, old_visit, 8) == 7 && ftw64(FOLDER, (void *)old_visit, 8) == 7);
    // Nested walks.
    CHECK(nftw(FOLDER, nested_visit, 8, FTW_PHYS) == 0 && nested == 2);
    glob_t found = {0};
    CHECK(glob(FOLDER "/*/node_*", 0, NULL, &found) == 0 && found.gl_pathc == 3);
    CHECK(!strcmp(found.gl_pathv[0], FOLDER "/rnicd1/node_desc"));
    CHECK(!(found.gl_flags & GLOB_ALTDIRFUNC));
    CHECK(glob("/dev/nul[l]", GLOB_APPEND, NULL, &found) == 0 && found.gl_pathc == 4);
    globfree(&found);
    CHECK(glob64(FOLDER "/none*", 0, NULL, (void *)&found) == GLOB_NOMATCH);
    // Relative patterns, in the tree and in the folders above it.
    const char *const folders[] = {"/", "/sys", "/sys/class", FOLDER};
    for (size_t n = 0; n < sizeof folders / sizeof *folders; n++) {
        const char *pattern = FOLDER "/rnic*/node_type" + strlen(folders[n]);
        CHECK(chdir(folders[n]) == 0);
        CHECK(glob(pattern + (*pattern == '/'), 0, NULL, &found) == 0 && found.gl_pathc == 1);
        globfree(&found);
    }
    CHECK(chdir("/") == 0);
    char *const paths[] = {FOLDER "/rnicd1/", "/dev/infiniband", NULL};
    FTS *walk = fts_open(paths, FTS_PHYSICAL, NULL);
    int files = 0;
    for (FTSENT *e; walk && (e = fts_read(walk));)
        files += !strcmp(e->fts_name, "node_type") || !strcmp(e->fts_name, "uverbs0");
    CHECK(walk && files == 2 && fts_close(walk) == 0);
}

static void others(void)
{
    char to[PATH_MAX];
    struct statfs a, b;
    struct statvfs c;
    CHECK(statfs(FOLDER "/rnicd1", &a) == 0 && statvfs(FOLDER "/rnicd1", &c) == 0);
    CHECK(statfs("/proc", &b) == 0);
    CHECK(getxattr(FOLDER, "user.none", to, sizeof to) == -1 && errno != ENOENT);
    CHECK(lgetxattr(FOLDER "/rnicd1", "user.none", to, sizeof to) == -1 && errno != ENOENT);
    CHECK(listxattr(FOLDER, to, sizeof to) >= 0 || errno == ENOTSUP);
    CHECK(llistxattr(FOLDER "/rnicd1", to, sizeof to) >= 0 || errno == ENOTSUP);
    int watches = inotify_init();
    CHECK(inotify_add_watch(watches, "/dev/infiniband", IN_CREATE) > 0);
    close(watches);
    struct dirent **names;
    CHECK(scandirat(AT_FDCWD, FOLDER, &names, NULL, alphasort) == 3);
    FILE *file = freopen(FOLDER "/rnicd1/node_type", "r", fopen("/dev/null", "r"));
    CHECK(file && fgets(to, sizeof to, file) && !strcmp(to, "1: CA\n"));
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    CHECK(posix_spawn_file_actions_addchdir_np(&actions, FOLDER "/rnicd1") == 0);
    CHECK(posix_spawn_file_actions_addopen(&actions, 0, FOLDER "/rnicd1/node_type", 0, 0) == 0);
    char *const words[] = {"sh", "-c", "read a < node_type && read b && test \"$a$b\" = '1: CA1: CA'",
                           NULL};
    pid_t child;
    int status = -1;
    CHECK(posix_spawnp(&child, "sh", &actions, NULL, words, environ) == 0);
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}

// A child that shares the memory of its parent.
static void child_of_vfork(void)
{
    pid_t child = vfork();
    if (child == 0)
        _exit(chdir(FOLDER "/rnicd1") || access("node_type", R_OK));
    int status = -1;
    char to[PATH_MAX];
    CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    CHECK(!strcmp(getcwd(to, sizeof to), "/"));
}

static void *in_thread(void *unused)
{
    for (int n = 0; n < 1000; n++) {
        char to[PATH_MAX];
        if (!is_device(realpath(FOLDER "/rnicd1", to)) || access("/sys/class/infiniband", R_OK))
            return "wrong";
    }
    return NULL;
}

static void threads(void)
{
    pthread_t all[4];
    for (int n = 0; n < 4; n++)
        CHECK(pthread_create(&all[n], NULL, in_thread, NULL) == 0);
    for (int n = 0; n < 4; n++) {
        void *result = NULL;
        CHECK(pthread_join(all[n], &result) == 0 && result == NULL);
    }
}

int main(void)
{
    setvbuf(stdout, NULL, _IONBF, 0);
    working_directory();
    walks();
    others();
    child_of_vfork();
    threads();
    if (wrong == 0)
        puts("done");
    return wrong != 0;
}
