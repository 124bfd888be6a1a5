"""Creates QPs for the ibv_wr_* calls as programs do, and prints "done" on success."""

import errno

import pyverbs.enums as e
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.pd import PD
from pyverbs.pyverbs_error import PyverbsRDMAError
from pyverbs.qp import QPCap, QPEx, QPInitAttrEx

context = Context(name="rnicd0")
pd = PD(context)
cq = CQ(context, 16, None, None, 0)


def make(more, **wanted):
    """Creates a QP with these additional attributes."""
    wanted = QPInitAttrEx(
        qp_type=e.IBV_QPT_RC,
        scq=cq,
        rcq=cq,
        cap=QPCap(),
        pd=pd,
        comp_mask=e.IBV_QP_INIT_ATTR_PD | more,
        **wanted,
    )
    return QPEx(context, wanted)


def refused(call, number):
    try:
        call()
    except PyverbsRDMAError as error:
        assert error.error_code == number, error
    else:
        raise AssertionError("the call is not refused")


# Zero flags are accepted.
make(e.IBV_QP_INIT_ATTR_CREATE_FLAGS, create_flags=0).close()
flag = e.IBV_QP_CREATE_SCATTER_FCS
refused(lambda: make(e.IBV_QP_INIT_ATTR_CREATE_FLAGS, create_flags=flag), errno.EOPNOTSUPP)

# A Send with immediate data may be requested at creation, but is refused when posted.
operations = (
    e.IBV_QP_EX_WITH_SEND
    | e.IBV_QP_EX_WITH_SEND_WITH_IMM
    | e.IBV_QP_EX_WITH_RDMA_WRITE
    | e.IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM
    | e.IBV_QP_EX_WITH_RDMA_READ
    | e.IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD
    | e.IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP
)
qp = make(e.IBV_QP_INIT_ATTR_SEND_OPS_FLAGS, send_ops_flags=operations)
qp.wr_start()
qp.wr_send_imm(7)
refused(qp.wr_complete, errno.EINVAL)
qp.close()

# An operation that no QP of the daemon supports is refused at creation.
tso = e.IBV_QP_EX_WITH_TSO
refused(lambda: make(e.IBV_QP_INIT_ATTR_SEND_OPS_FLAGS, send_ops_flags=tso), errno.EOPNOTSUPP)
print("done")
