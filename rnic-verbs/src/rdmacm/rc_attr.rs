//! Parameters of a connection of an RC or UC QP, and the attributes that the QP gets from them
//! (`rdma_init_qp_attr(3)`).

use std::ffi::c_int;
use std::net::{IpAddr, Ipv4Addr};

use rnic_client::{DeviceAttributes, Gid, GidRow, RcOffer, RcPeer};
use rustix::rand::{GetRandomFlags, getrandom};

use crate::c::*;
use crate::errno::Errno;
use crate::verbs::ah::attributes_to;
use crate::verbs::context::mtu_code;
use crate::verbs::device::PORT;

/// Parameters of the connection of an id, from which its QP gets its attributes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RcConnection {
    /// PSN of this end, 24 bits, chosen at its first use. As in the kernel, the peer's first packet
    /// has the PSN that this end offers, and this end's first packet the PSN that the peer offers.
    pub(super) psn: Option<u32>,
    /// Outstanding Reads and atomic operations, once either end has requested a connection.
    pub(super) reads: Option<Reads>,
    /// This end's parameters, once it has requested a connection.
    pub(super) offer: Option<RcOffer>,
    /// The peer's parameters, once known.
    pub(super) peer: Option<RcPeer>,
}

/// Numbers of outstanding Reads and atomic operations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Reads {
    /// From the peer (`responder_resources`).
    pub(super) inbound: u8,
    /// To the peer (`initiator_depth`).
    pub(super) outbound: u8,
}

impl Reads {
    /// Returns the maxima of the device.
    pub(super) fn most(of: &DeviceAttributes) -> Self {
        Reads { inbound: saturate(of.max_ird), outbound: saturate(of.max_ord) }
    }

    /// Returns the numbers that the peer's parameters require, at most `most`.
    pub(super) fn of_peer(peer: &RcPeer, most: Reads) -> Self {
        Reads {
            inbound: peer.initiator_depth.min(most.inbound),
            outbound: peer.responder_resources.min(most.outbound),
        }
    }
}

impl RcConnection {
    /// Returns the state of an id that was created by the request of this peer.
    pub(super) fn of_request(peer: &RcPeer, most: Reads) -> Self {
        let reads = Some(Reads::of_peer(peer, most));
        RcConnection { reads, peer: Some(*peer), ..Self::default() }
    }

    /// Returns this end's parameters, once it has requested a connection.
    pub(super) fn offer(&self) -> Option<RcOffer> {
        self.offer
    }

    /// Handles the peer's reply.
    pub(super) fn replied(&mut self, peer: RcPeer, most: Reads) {
        self.reads = Some(Reads::of_peer(&peer, most));
        self.peer = Some(peer);
    }

    /// Returns the PSN of this end.
    pub(super) fn psn(&mut self) -> Result<u32, Errno> {
        if let Some(psn) = self.psn {
            return Ok(psn);
        }
        let mut bytes = [0; 4];
        // `getrandom` returns up to 256 bytes in full.
        rustix::io::retry_on_intr(|| getrandom(&mut bytes, GetRandomFlags::empty()))?;
        Ok(*self.psn.insert(u32::from_ne_bytes(bytes) & LOW_24))
    }

    /// Fills in the attributes for the transition to `to.qp_state`, with the kernel's values.
    /// `source` is the index of the source GID, for RTR. Returns their mask.
    ///
    /// # Errors
    ///
    /// `EINVAL` for other states than INIT, RTR and RTS, and for the latter two before the peer's
    /// parameters are known.
    pub(super) fn attributes(
        &mut self,
        to: &mut ibv_qp_attr,
        is_uc: bool,
        source: u16,
        ack_timeout: Option<u8>,
    ) -> Result<c_int, Errno> {
        let reads = self.reads.unwrap_or_default();
        match to.qp_state {
            IBV_QPS_INIT => {
                to.port_num = PORT;
                to.qp_access_flags = match self.reads {
                    None => 0,
                    Some(Reads { inbound: 0, .. }) => IBV_ACCESS_REMOTE_WRITE,
                    Some(_) => {
                        IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC
                    }
                };
                Ok(IBV_QP_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX | IBV_QP_PORT)
            }
            IBV_QPS_RTR => {
                let peer = self.peer()?;
                to.ah_attr = attributes_to(source, peer.gid)?;
                to.ah_attr.grh.hop_limit = HOP_LIMIT;
                to.ah_attr.grh.traffic_class = peer.traffic_class;
                to.path_mtu = mtu_code(peer.path_mtu.into());
                to.dest_qp_num = peer.qp.0;
                to.rq_psn = self.psn()?;
                let mask =
                    IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
                if is_uc {
                    return Ok(mask);
                }
                to.max_dest_rd_atomic = reads.inbound;
                // 655 ms, the longest time.
                to.min_rnr_timer = 0;
                Ok(mask | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER)
            }
            IBV_QPS_RTS => {
                let peer = self.peer()?;
                to.sq_psn = peer.psn;
                if is_uc {
                    return Ok(IBV_QP_STATE | IBV_QP_SQ_PSN);
                }
                let of_path = match peer.ack_timeout {
                    0 => PACKET_LIFE_TIME + 1,
                    timeout => timeout,
                };
                to.timeout = ack_timeout.unwrap_or(of_path);
                to.retry_cnt = peer.retry_count;
                to.rnr_retry = peer.rnr_retry;
                to.max_rd_atomic = reads.outbound;
                Ok(IBV_QP_STATE
                    | IBV_QP_SQ_PSN
                    | IBV_QP_TIMEOUT
                    | IBV_QP_RETRY_CNT
                    | IBV_QP_RNR_RETRY
                    | IBV_QP_MAX_QP_RD_ATOMIC)
            }
            state => Err(no_transition(state)),
        }
    }

    pub(super) fn peer(&self) -> Result<RcPeer, Errno> {
        self.peer.ok_or_else(|| invalid!("the parameters of the peer are not known yet"))
    }
}

pub(super) fn no_transition(state: ibv_qp_state) -> Errno {
    invalid!("qp_state {state}: rdma_init_qp_attr supports INIT, RTR and RTS")
}

/// Returns the GID of a host address. An IPv4 loopback address without an entry in the daemon's GID
/// table has the GID of 127.0.0.1.
pub(super) fn gid_of(ip: IpAddr, table: &[GidRow]) -> Gid {
    let own = Gid::from(ip);
    let is_alias = ip.is_ipv4() && ip.is_loopback() && table.iter().all(|row| row.gid != own);
    if is_alias { IpAddr::from(Ipv4Addr::LOCALHOST).into() } else { own }
}

pub(super) fn saturate(n: u16) -> u8 {
    u8::try_from(n).unwrap_or(u8::MAX)
}

/// The kernel's default hop limit.
pub(super) const HOP_LIMIT: u8 = 64;
/// `CMA_IBOE_PACKET_LIFETIME`: the kernel's value for RoCE, 4.096 us times two to this power.
pub(super) const PACKET_LIFE_TIME: u8 = 16;
const LOW_24: u32 = (1 << 24) - 1;

#[cfg(test)]
mod tests {
    use rnic_client::QpId;

    use super::*;
    use crate::ffi::handles::zeroed;
    use crate::verbs::adapter::empty_gid;

    const MOST: Reads = Reads { inbound: 16, outbound: 8 };

    fn peer() -> RcPeer {
        RcPeer {
            source: 3,
            gid: Gid([7; 16]),
            qp: QpId(0x1234),
            psn: 0x65_4321,
            responder_resources: 5,
            initiator_depth: 200,
            retry_count: 6,
            rnr_retry: 2,
            ack_timeout: 0,
            path_mtu: 2048,
            traffic_class: 0x28,
            srq: true,
        }
    }

    fn attributes(
        of: &mut RcConnection,
        state: ibv_qp_state,
        is_uc: bool,
    ) -> Result<(ibv_qp_attr, c_int), i32> {
        let mut attributes: ibv_qp_attr = zeroed();
        attributes.qp_state = state;
        let mask =
            of.attributes(&mut attributes, is_uc, 3, None).map_err(|errno| errno.number())?;
        Ok((attributes, mask))
    }

    #[test]
    fn access_depends_on_the_requested_reads() {
        let access = |reads| {
            let mut connection = RcConnection { reads, ..RcConnection::default() };
            let (attributes, mask) = attributes(&mut connection, IBV_QPS_INIT, false)?;
            let expected = IBV_QP_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX | IBV_QP_PORT;
            assert_eq!(mask, expected);
            assert_eq!(attributes.port_num, PORT);
            Ok::<_, i32>(attributes.qp_access_flags)
        };
        assert_eq!(access(None), Ok(0));
        let writes = IBV_ACCESS_REMOTE_WRITE;
        assert_eq!(access(Some(Reads { inbound: 0, outbound: 1 })), Ok(writes));
        let all = writes | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
        assert_eq!(access(Some(MOST)), Ok(all));
    }

    #[test]
    fn attributes_follow_the_peer() {
        let mut none = RcConnection::default();
        for state in [IBV_QPS_RTR, IBV_QPS_RTS, IBV_QPS_SQD] {
            assert_eq!(attributes(&mut none, state, false).err(), Some(libc::EINVAL));
        }
        let mut connection = RcConnection::of_request(&peer(), MOST);
        connection.psn = Some(0x12_3456);
        let (rtr, mask) = attributes(&mut connection, IBV_QPS_RTR, false).expect("RTR");
        assert_eq!((rtr.rq_psn, rtr.dest_qp_num, rtr.path_mtu), (0x12_3456, 0x1234, IBV_MTU_2048));
        assert_eq!((rtr.max_dest_rd_atomic, rtr.min_rnr_timer), (MOST.inbound, 0));
        assert_eq!((rtr.ah_attr.grh.sgid_index, rtr.ah_attr.grh.hop_limit), (3, 64));
        assert_eq!((rtr.ah_attr.is_global, rtr.ah_attr.port_num), (1, PORT));
        assert_eq!(rtr.ah_attr.grh.traffic_class, 0x28);
        let of_uc = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
        assert_eq!(mask, of_uc | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
        assert_eq!(attributes(&mut connection, IBV_QPS_RTR, true).map(|found| found.1), Ok(of_uc));

        let (rts, mask) = attributes(&mut connection, IBV_QPS_RTS, false).expect("RTS");
        assert_eq!((rts.sq_psn, rts.timeout, rts.max_rd_atomic), (0x65_4321, 17, 5));
        assert_eq!((rts.retry_cnt, rts.rnr_retry), (6, 2));
        let of_uc = IBV_QP_STATE | IBV_QP_SQ_PSN;
        let of_rc = IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
        assert_eq!(mask, of_uc | of_rc);
        assert_eq!(attributes(&mut connection, IBV_QPS_RTS, true).map(|found| found.1), Ok(of_uc));
    }

    #[test]
    fn ack_timeout_is_the_option_or_the_path() {
        let timeout = |ack_timeout, option| {
            let peer = RcPeer { ack_timeout, ..peer() };
            let mut attributes: ibv_qp_attr = zeroed();
            attributes.qp_state = IBV_QPS_RTS;
            RcConnection::of_request(&peer, MOST)
                .attributes(&mut attributes, false, 0, option)
                .map(|_| attributes.timeout)
                .map_err(|errno| errno.number())
        };
        assert_eq!(timeout(0, None), Ok(17));
        assert_eq!(timeout(14, None), Ok(14));
        assert_eq!(timeout(14, Some(20)), Ok(20));
    }

    #[test]
    fn psn_is_chosen_once_and_has_24_bits() {
        let mut connection = RcConnection::default();
        let psn = connection.psn();
        assert!(psn.as_ref().is_ok_and(|psn| *psn <= LOW_24));
        assert_eq!(connection.psn(), psn);
    }

    #[test]
    fn loopback_addresses_share_a_gid() {
        let address = |text: &str| text.parse::<IpAddr>().expect("an address");
        let row = GidRow { gid: address("127.0.0.3").into(), ..empty_gid() };
        let gid = |text: &str| gid_of(address(text), std::slice::from_ref(&row));
        assert_eq!(gid("127.0.0.2"), gid("127.0.0.1"));
        assert_ne!(gid("127.0.0.3"), gid("127.0.0.1"));
        assert_ne!(gid("192.0.2.2"), gid("192.0.2.1"));
        assert_eq!(gid("::1"), Gid(std::net::Ipv6Addr::LOCALHOST.octets()));
    }
}
