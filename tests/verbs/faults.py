"""Two connected QPs of one process, under the fault rules of RNIC_FAULTS: the status of a
completion, the error number of a verb, and an asynchronous event. The QPs of the iWARP device are
connected by rdma_cm. The arguments are the device, an address of the host, and the expected status
of the second Read. Prints "done" on success."""

import errno
import sys

import pyverbs.cm_enums as ce
import pyverbs.enums as e
from pyverbs.addr import AHAttr, GlobalRoute
from pyverbs.cmid import CMID, AddrInfo, CMEvent, CMEventChannel, ConnParam
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.pyverbs_error import PyverbsRDMAError
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, SendWR

ACCESS = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_READ
PORT = 1
CAP = QPCap(max_send_wr=4, max_recv_wr=4, max_send_sge=1, max_recv_sge=1)


class Roce:
    def __init__(self):
        self.context = Context(name="rnicd1")
        self.pd = PD(self.context)
        self.cq = CQ(self.context, 16, None, None, 0)
        init = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self.cq, rcq=self.cq, cap=CAP)
        self.qps = [QP(self.pd, init), QP(self.pd, init)]
        self.connect(*self.qps)
        self.connect(*self.qps[::-1])

    def connect(self, qp, peer):
        attr = QPAttr(port_num=PORT)
        attr.qp_access_flags = ACCESS
        attr.dest_qp_num = peer.qp_num
        attr.path_mtu = e.IBV_MTU_1024
        attr.timeout = 14
        attr.retry_cnt = attr.rnr_retry = 7
        attr.max_rd_atomic = attr.max_dest_rd_atomic = 1
        route = GlobalRoute(dgid=self.context.query_gid(PORT, 0), sgid_index=0)
        attr.ah_attr = AHAttr(gr=route, is_global=1, port_num=PORT)
        qp.to_rts(attr)

    def read(self, mr):
        sge = SGE(mr.buf, 8, mr.lkey)
        request = SendWR(num_sge=1, sg=[sge], opcode=e.IBV_WR_RDMA_READ)
        request.set_wr_rdma(mr.rkey, mr.buf + 32)
        self.qps[0].post_send(request)
        while True:
            count, completions = self.cq.poll()
            if count:
                return completions[0].status


class Iwarp:
    """The passive end is a synchronous ID, so a single thread can connect both."""

    def __init__(self, address):
        init = QPInitAttr(qp_type=e.IBV_QPT_RC, cap=CAP)
        where = {"port_space": ce.RDMA_PS_TCP}
        passive = AddrInfo(src=address, src_service="7000", flags=ce.RAI_PASSIVE, **where)
        listener = CMID(creator=passive, qp_init_attr=init)
        listener.listen(1)
        channel = CMEventChannel()
        active = CMID(creator=channel)
        active.resolve_addr(AddrInfo(dst=address, dst_service="7000", **where))
        self.expect(channel, ce.RDMA_CM_EVENT_ADDR_RESOLVED)
        active.resolve_route()
        self.expect(channel, ce.RDMA_CM_EVENT_ROUTE_RESOLVED)
        active.create_qp(init)
        active.connect(ConnParam(resources=1, depth=1))
        peer = listener.get_request()
        peer.accept(ConnParam(resources=1, depth=1))
        self.expect(channel, ce.RDMA_CM_EVENT_ESTABLISHED)
        # The IDs of a device share a PD.
        self.context, self.pd = active.context, active.pd
        self.active, self.others = active, (peer, listener, channel)

    def expect(self, channel, kind):
        event = CMEvent(channel)
        assert event.event_type == kind, event.event_str()
        event.ack_cm_event()

    def read(self, mr):
        self.active.post_read(mr, 8, mr.buf + 32, mr.rkey, e.IBV_SEND_SIGNALED)
        return self.active.get_send_comp().status


device, address, status = sys.argv[1:]
ends = Iwarp(address) if device == "rnicd0" else Roce()
mr = MR(ends.pd, 64, ACCESS | e.IBV_ACCESS_REMOTE_WRITE)
assert ends.read(mr) == e.IBV_WC_SUCCESS
assert ends.read(mr) == getattr(e, status)

event = ends.context.get_async_event()
assert event.event_type == e.IBV_EVENT_CLIENT_REREGISTER, event
event.ack()

try:
    MR(ends.pd, 64, ACCESS)
except PyverbsRDMAError as error:
    assert error.error_code == errno.ENOMEM, error
else:
    raise AssertionError("the registration has not failed")
MR(ends.pd, 64, ACCESS).close()
print("done")
