// Prints the device of an id that is bound to each of the IPv4 addresses in the arguments. One that is
// bound to a loopback address gets its device when it resolves the address.

#include "refusals.h"
#include <arpa/inet.h>
#include <rdma/rdma_cma.h>

int main(int count, char **addresses)
{
    struct rdma_event_channel *channel = rdma_create_event_channel();
    CHECK(channel);
    for (int n = 1; n < count; n++) {
        struct rdma_cm_id *id = NULL;
        struct sockaddr_in own = {.sin_family = AF_INET};
        CHECK(inet_pton(AF_INET, addresses[n], &own.sin_addr) == 1);
        CHECK(!rdma_create_id(channel, &id, NULL, RDMA_PS_TCP));
        if (rdma_bind_addr(id, (struct sockaddr *)&own))
            printf("%s: errno %d\n", addresses[n], errno);
        else if (!id->verbs) {
            struct rdma_cm_event *resolved;
            CHECK(!rdma_resolve_addr(id, NULL, (struct sockaddr *)&own, 1000));
            CHECK(!rdma_get_cm_event(channel, &resolved) && !resolved->status);
            printf("%s: %s\n", addresses[n], ibv_get_device_name(id->verbs->device));
            CHECK(!rdma_ack_cm_event(resolved));
        } else
            printf("%s: %s\n", addresses[n], ibv_get_device_name(id->verbs->device));
        CHECK(!rdma_destroy_id(id));
    }
    rdma_destroy_event_channel(channel);
    return wrong != 0;
}
