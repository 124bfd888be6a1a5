// Checks of calls that fail: by the error number, and by the reason that the library logs to
// standard error with RNIC_LOG=debug.

#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static int wrong;

// Offset of the next reason in the file to which standard error goes; -1 without RNIC_LOG.
static off_t reasons = -1;

// Redirects standard error to a file, so that has_reason() can read it.
__attribute__((unused)) static void read_reasons(void)
{
    if (!getenv("RNIC_LOG"))
        return;
    int file = memfd_create("reasons", 0);
    if (file < 0 || dup2(file, 2) < 0) {
        perror("memfd_create");
        exit(1);
    }
    reasons = lseek(2, 0, SEEK_CUR);
}

// Skips the reasons logged so far.
__attribute__((unused)) static void begin_call(void)
{
    if (reasons >= 0)
        reasons = lseek(2, 0, SEEK_CUR);
    errno = 0;
}

// Returns true if a text contains a reason: a line that begins with the name of a function.
__attribute__((unused)) static int names_function(const char *text)
{
    for (const char *end; (end = strchr(text, '\n')); text = end + 1) {
        if (!strncmp(text, "rnic: ibv_", 10) || !strncmp(text, "rnic: rdma_", 11))
            return 1;
    }
    return 0;
}

// Requires a logged reason for the last call. EAGAIN is not a refusal.
__attribute__((unused)) static void has_reason(int line, const char *call, int number)
{
    char text[512] = "";
    if (reasons < 0 || number == EAGAIN)
        return;
    if (pread(2, text, sizeof text - 1, reasons) > 0 && names_function(text))
        return;
    printf("line %d: %s is refused without a reason\n", line, call);
    wrong++;
}

__attribute__((unused)) static void differs(int line, const char *call, int wanted, int found)
{
    printf("line %d: %s is %s instead of %s\n", line, call, strerrorname_np(found),
           strerrorname_np(wanted));
    wrong++;
}

// Prints a check that has failed, and the reasons logged since the last call.
__attribute__((unused)) static void fails(int line, const char *check)
{
    char text[512] = "";
    printf("line %d: failed: %s (%s)\n", line, check, strerrorname_np(errno));
    if (reasons >= 0 && pread(2, text, sizeof text - 1, reasons) > 0)
        printf("%s", text);
}

// A call that returns its error number, or 0.
#define RETURNS(number, call)                                                                       \
    do {                                                                                            \
        begin_call();                                                                               \
        int result = (call);                                                                        \
        if (result != (number))                                                                     \
            differs(__LINE__, #call, number, result);                                               \
        else if (result != 0)                                                                       \
            has_reason(__LINE__, #call, result);                                                    \
    } while (0)

// A call that is refused by an inline function of the C headers.
#define HEADER_RETURNS(number, call)                                                                \
    do {                                                                                            \
        int result = (call);                                                                        \
        if (result != (number))                                                                     \
            differs(__LINE__, #call, number, result);                                               \
    } while (0)

// A call that returns a special value on failure and sets errno.
#define SETS(number, failed, call)                                                                  \
    do {                                                                                            \
        begin_call();                                                                               \
        int has_failed = (call) == (failed);                                                        \
        int error = errno;                                                                          \
        if (!has_failed || error != (number))                                                       \
            differs(__LINE__, #call, number, has_failed ? error : 0);                               \
        else                                                                                        \
            has_reason(__LINE__, #call, error);                                                     \
    } while (0)

#define MINUS(number, call) SETS(number, -1, call)
#define NONE(number, call) SETS(number, NULL, call)
#define FINE(call) RETURNS(0, call)

// Reports a condition that does not hold. A refused call in the condition must have a reason.
#define CHECK(what)                                                                                 \
    do {                                                                                            \
        begin_call();                                                                               \
        if (!(what)) {                                                                              \
            fails(__LINE__, #what);                                                                 \
            wrong++;                                                                                \
        } else if (errno == EINVAL || errno == EOPNOTSUPP || errno == EBUSY || errno == ENOENT)     \
            has_reason(__LINE__, #what, errno);                                                     \
    } while (0)

// Ends the program if a condition does not hold.
#define MUST(what)                                                                                  \
    do {                                                                                            \
        begin_call();                                                                               \
        if (!(what)) {                                                                              \
            fails(__LINE__, #what);                                                                 \
            exit(1);                                                                                \
        }                                                                                           \
    } while (0)
