// Lists the devices after each line of its input, while the first device stays open. At the end of
// the input, uses that device again. Prints "done" on success.

#include "refusals.h"
#include <infiniband/verbs.h>

static void list(struct ibv_context **opened)
{
    int count = -1;
    struct ibv_device **devices = ibv_get_device_list(&count);
    CHECK(devices && count >= 0);
    printf("devices:");
    for (int n = 0; devices && n < count; n++)
        printf(" %s", ibv_get_device_name(devices[n]));
    puts("");
    fflush(stdout);
    if (devices && count > 0 && !*opened)
        CHECK((*opened = ibv_open_device(devices[0])));
    ibv_free_device_list(devices);
}

int main(void)
{
    char line[64];
    struct ibv_context *opened = NULL;
    while (fgets(line, sizeof line, stdin))
        list(&opened);
    CHECK(opened);
    CHECK(!strcmp(ibv_get_device_name(opened->device), "first"));
    struct ibv_device_attr attr;
    CHECK(!ibv_query_device(opened, &attr) && attr.node_guid);
    union ibv_gid gid;
    CHECK(!ibv_query_gid(opened, 1, 0, &gid));
    CHECK(gid.global.interface_id || gid.global.subnet_prefix);
    struct ibv_pd *pd = ibv_alloc_pd(opened);
    struct ibv_ah_attr to = {.is_global = 1, .port_num = 1, .grh = {.dgid = gid}};
    struct ibv_ah *ah = ibv_create_ah(pd, &to);
    CHECK(ah && !ibv_destroy_ah(ah) && !ibv_dealloc_pd(pd));
    CHECK(!ibv_close_device(opened));
    if (!wrong)
        puts("done");
    return wrong != 0;
}
