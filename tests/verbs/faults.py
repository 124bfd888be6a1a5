"""Two connected RC QPs of one process, under the fault rules of RNIC_FAULTS: the status of a
completion, the error number of a verb, and an asynchronous event. Prints "done" on success."""

import errno
import sys

import pyverbs.enums as e
from pyverbs.addr import AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.pyverbs_error import PyverbsRDMAError
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, SendWR

ACCESS = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE
PORT = 1

context = Context(name=sys.argv[1])
pd = PD(context)
cq = CQ(context, 16, None, None, 0)
mr = MR(pd, 64, ACCESS)
gid = context.query_gid(PORT, 0)


def make():
    cap = QPCap(max_send_wr=4, max_recv_wr=4, max_send_sge=1, max_recv_sge=1)
    return QP(pd, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=cq, rcq=cq, cap=cap))


def connect(qp, peer):
    attr = QPAttr(port_num=PORT)
    attr.qp_access_flags = ACCESS
    attr.dest_qp_num = peer.qp_num
    attr.path_mtu = e.IBV_MTU_1024
    attr.timeout = 14
    attr.retry_cnt = attr.rnr_retry = 7
    attr.max_rd_atomic = attr.max_dest_rd_atomic = 1
    route = GlobalRoute(dgid=gid, sgid_index=0)
    attr.ah_attr = AHAttr(gr=route, is_global=1, port_num=PORT)
    qp.to_rts(attr)


def write(number):
    """Posts a Write and returns the status of its completion."""
    request = SendWR(number, num_sge=1, sg=[SGE(mr.buf, 8, mr.lkey)], opcode=e.IBV_WR_RDMA_WRITE)
    request.set_wr_rdma(mr.rkey, mr.buf + 32)
    qps[0].post_send(request)
    while True:
        count, completions = cq.poll()
        if count:
            assert completions[0].wr_id == number, completions[0]
            return completions[0].status


qps = [make(), make()]
for qp, peer in [qps, qps[::-1]]:
    connect(qp, peer)
assert write(1) == e.IBV_WC_SUCCESS
assert write(2) == e.IBV_WC_REM_ACCESS_ERR

event = context.get_async_event()
assert event.event_type == e.IBV_EVENT_CLIENT_REREGISTER, event
event.ack()

try:
    MR(pd, 64, ACCESS)
except PyverbsRDMAError as error:
    assert error.error_code == errno.ENOMEM, error
else:
    raise AssertionError("the registration has not failed")
MR(pd, 64, ACCESS).close()
print("done")
