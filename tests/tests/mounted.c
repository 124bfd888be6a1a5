// Looks for RDMA devices by system calls only, like a program without a shared C library
// (statically linked). Prints "done" if it finds the daemon's devices next to the kernel's files.

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static int wrong;

static void check(int holds, const char *what)
{
    if (!holds) {
        printf("failed: %s\n", what);
        wrong++;
    }
}

static int contains(const char *path, const char *expected)
{
    char text[64] = "";
    int fd = open(path, O_RDONLY);
    ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    close(fd);
    return n >= 0 && !strcmp(text, expected);
}

static int has(const char *folder, const char *name)
{
    int found = 0;
    DIR *all = opendir(folder);
    for (struct dirent *entry; all && (entry = readdir(all));)
        found += !strcmp(entry->d_name, name);
    if (all)
        closedir(all);
    return found == 1;
}

int main(void)
{
    struct stat found;
    check(has("/sys/class", "infiniband"), "infiniband is in /sys/class");
    check(lstat("/sys/class/infiniband", &found) == 0 && S_ISDIR(found.st_mode),
          "infiniband is a folder");
    check(has("/sys/class/infiniband", "rnicd0"), "rnicd0 is in /sys/class/infiniband");
    check(contains("/sys/class/infiniband/rnicd1/node_type", "1: CA\n"), "rnicd1 is a CA");
    check(contains("/sys/class/infiniband_verbs/uverbs0/ibdev", "rnicd1\n"),
          "uverbs0 belongs to rnicd1");
    check(contains("/sys/class/infiniband_verbs/abi_version", "6\n"),
          "abi_version is next to the links");
    check(access("/sys/devices/rnicd/rnicd1/numa_node", R_OK) == 0, "rnicd1 is in /sys/devices");
    check(has("/dev/infiniband", "uverbs0"), "uverbs0 is in /dev/infiniband");
    check(access("/dev/infiniband/uverbs0", R_OK | W_OK) == 0, "uverbs0 may be read and written");
    check(stat("/dev/infiniband/uverbs0", &found) == 0 && S_ISCHR(found.st_mode),
          "uverbs0 is a device");
    check(contains("/sys/class/net/lo/ifindex", "1\n"), "the kernel's classes remain in /sys");
    check(has("/sys/devices/system/cpu", "cpu0"), "the kernel's devices remain in /sys");
    int null = open("/dev/null", O_WRONLY);
    check(null >= 0 && write(null, "x", 1) == 1, "/dev/null is writable");
    check(open("/dev/new", O_WRONLY | O_CREAT, 0600) < 0, "no file can be created in /dev");
    if (!wrong)
        puts("done");
    return wrong != 0;
}
