// Looks for RDMA devices in /sys and /dev with every function that programs use. Prints "done" if
// it finds the daemon's devices.

#include "refusals.h"
#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <sys/stat.h>

#define FOLDER "/sys/class/infiniband"
#define TYPE FOLDER "/rnicd1/node_type"
#define DEVICE "/dev/infiniband/uverbs0"

int __open_2(const char *path, int flags);
int __open64_2(const char *path, int flags);
int __openat_2(int folder, const char *path, int flags);
int __openat64_2(int folder, const char *path, int flags);
char *__realpath_chk(const char *path, char *to, size_t room);
ssize_t __readlink_chk(const char *path, char *to, size_t size, size_t room);

// Returns true if the descriptor refers to the file with the node type of rnicd1.
static int is_ca(int fd)
{
    char text[16] = "";
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    return n > 0 && !strcmp(text, "1: CA\n");
}

static int is_ca_file(FILE *file)
{
    char text[16] = "";
    int matches = file && fgets(text, sizeof text, file) && !strcmp(text, "1: CA\n");
    if (file)
        fclose(file);
    return matches;
}

static int ends_in(const char *path, const char *end)
{
    size_t n = path ? strlen(path) : 0, m = strlen(end);
    return n >= m && !strcmp(path + n - m, end);
}

static void opens(void)
{
    int at = AT_FDCWD;
    CHECK(is_ca(open(TYPE, O_RDONLY)) && is_ca(open64(TYPE, O_RDONLY)));
    CHECK(is_ca(openat(at, TYPE, O_RDONLY)) && is_ca(openat64(at, TYPE, O_RDONLY)));
    CHECK(is_ca(__open_2(TYPE, O_RDONLY)) && is_ca(__open64_2(TYPE, O_RDONLY)));
    CHECK(is_ca(__openat_2(at, TYPE, O_RDONLY)) && is_ca(__openat64_2(at, TYPE, O_RDONLY)));
    CHECK(is_ca_file(fopen(TYPE, "r")) && is_ca_file(fopen64(TYPE, "r")));
    // Relative to a folder of the tree.
    int folder = open(FOLDER "/rnicd1", O_RDONLY | O_DIRECTORY);
    CHECK(folder >= 0 && is_ca(openat(folder, "node_type", O_RDONLY)));
    close(folder);
    CHECK(open(FOLDER "/rnicd7/node_type", O_RDONLY) == -1 && errno == ENOENT);
    CHECK(fopen(DEVICE "x", "r") == NULL && errno == ENOENT);
}

static void looks(void)
{
    struct stat a;
    struct stat64 b;
    struct statx c;
    CHECK(stat(DEVICE, &a) == 0 && S_ISCHR(a.st_mode));
    CHECK(stat64(DEVICE, &b) == 0 && S_ISCHR(b.st_mode));
    CHECK(lstat(DEVICE, &a) == 0 && S_ISLNK(a.st_mode));
    CHECK(lstat64(DEVICE, &b) == 0 && S_ISLNK(b.st_mode));
    CHECK(fstatat(AT_FDCWD, DEVICE, &a, 0) == 0 && S_ISCHR(a.st_mode));
    CHECK(fstatat64(AT_FDCWD, DEVICE, &b, 0) == 0 && S_ISCHR(b.st_mode));
    CHECK(statx(AT_FDCWD, DEVICE, 0, STATX_TYPE, &c) == 0 && S_ISCHR(c.stx_mode));
    CHECK(access(DEVICE, R_OK | W_OK) == 0 && euidaccess(DEVICE, R_OK | W_OK) == 0);
    CHECK(eaccess(DEVICE, R_OK) == 0 && faccessat(AT_FDCWD, DEVICE, R_OK, 0) == 0);
    CHECK(access(DEVICE, X_OK) == -1 && errno == EACCES);
    CHECK(access(FOLDER "_verbs/uverbs0/ibdev", R_OK) == 0);
}

static void lists(void)
{
    int found = 0;
    DIR *folder = opendir(FOLDER);
    CHECK(folder);
    for (struct dirent *e; folder && (e = readdir(folder));)
        found += !strcmp(e->d_name, "rnicd0") || !strcmp(e->d_name, "rnicd1");
    CHECK(found == 2);
    if (folder)
        closedir(folder);
    struct dirent **names;
    int count = scandir("/dev/infiniband", &names, NULL, alphasort);
    CHECK(count == 5);
    for (int i = 0; i < count; i++)
        free(names[i]);
}

static void links(void)
{
    char to[PATH_MAX] = "";
    CHECK(readlink(FOLDER "/rnicd1", to, sizeof to) > 0 && ends_in(to, "infiniband/rnicd1"));
    memset(to, 0, sizeof to);
    CHECK(readlinkat(AT_FDCWD, DEVICE, to, sizeof to) == 9 && !strcmp(to, "/dev/null"));
    CHECK(__readlink_chk(DEVICE, to, sizeof to, sizeof to) == 9);
    // The parent folders lead to the device.
    CHECK(ends_in(realpath(FOLDER "/rnicd1/../..", to), "/devices/rnicd/rnicd1"));
    CHECK(ends_in(__realpath_chk(FOLDER "/rnicd1", to, sizeof to), "/infiniband/rnicd1"));
    char *name = canonicalize_file_name(FOLDER "/rnicd1/device");
    CHECK(ends_in(name, "/devices/rnicd/rnicd1"));
    free(name);
    // The path to which the links lead can be used as well.
    CHECK(access("/sys/devices/rnicd/rnicd1/numa_node", R_OK) == 0);
}

static void others(void)
{
    struct stat a, b;
    // A path with the same prefix that is not below the folder, and an empty path.
    CHECK(stat("/sys/class/infini", &a) == -1 && errno == ENOENT);
    CHECK(stat("/dev/null", &a) == 0 && fstatat(AT_FDCWD, "/dev/../dev/null", &b, 0) == 0);
    CHECK(a.st_rdev == b.st_rdev && a.st_ino == b.st_ino);
    CHECK(open("", O_RDONLY) == -1 && errno == ENOENT);
    errno = 77;
    int fd = open("/dev/null", O_RDONLY);
    int file = open(TYPE, O_RDONLY);
    if (fd < 0 || file < 0 || errno != 77) {
        puts("errno has changed");
        wrong++;
    }
    char name[] = "/tmp/rnic-looks-XXXXXX";
    close(mkstemp(name));
    unlink(name);
    int made = open(name, O_WRONLY | O_CREAT | O_EXCL, 0640);
    CHECK(fstat(made, &a) == 0 && (a.st_mode & 07777 & ~0640) == 0 && (a.st_mode & 0600) == 0600);
    unlink(name);
}

int main(void)
{
    opens();
    looks();
    lists();
    links();
    others();
    if (wrong == 0)
        puts("done");
    return wrong != 0;
}
