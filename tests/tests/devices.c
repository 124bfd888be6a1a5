// Prints the names of all RDMA devices, one per line.

#include <infiniband/verbs.h>
#include <stdio.h>

int main(void)
{
    int count;
    struct ibv_device **devices = ibv_get_device_list(&count);
    for (int n = 0; devices && n < count; n++)
        puts(ibv_get_device_name(devices[n]));
    return 0;
}
