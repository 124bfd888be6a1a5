//! Misuse of RC, UC and UD QPs: state changes in any order, with any values, on any QP.

use std::net::SocketAddr;

use rnic_abi::abi::control::*;
use rnic_abi::roce::PortSpace;
use rnic_abi::types::*;

use super::{Session, pick};
use crate::raw::qp_request;
use crate::traffic::Rng;

/// Objects of the RoCE device in a session.
#[derive(Default)]
pub(super) struct RoceObjects {
    qps: Vec<QpId>,
    gids: Vec<Gid>,
    /// Listeners for UD and RC requests, and their addresses.
    ports: Vec<(ListenerId, SocketAddr)>,
}

impl Session {
    /// Misuses QPs and ports. Returns `None` when the session has ended.
    pub(super) fn misuse_roce(&mut self, rng: &mut Rng) -> Option<()> {
        let asks = self.roce.gids.is_empty() || rng.below(16) == 0;
        if asks && let Ok(ReplyBody::Gids(rows)) = self.raw.try_call(RequestBody::QueryGids, &[])? {
            self.roce.gids = rows.into_iter().map(|row| row.gid).collect();
        }
        while self.roce.qps.len() < 2 || rng.below(8) == 0 {
            if !self.make_roce_qp(rng)? {
                break;
            }
        }
        // Sometimes connect two QPs correctly, so that there is a working connection to damage.
        if rng.below(4) == 0 {
            let ends = [pick(&self.roce.qps, rng)?, pick(&self.roce.qps, rng)?];
            let wiring = [ends[1], ends[0]].map(|peer| self.honest(peer));
            let sending = Sending { sq_psn: 7, timeout: 14, retry_count: 7, rnr_retry: 7, ord: 4 };
            for (qp, wiring) in ends.into_iter().zip(wiring) {
                self.change(qp, QpChange::Reset)?;
                self.change(qp, QpChange::ReadyToReceive(wiring))?;
            }
            for qp in ends {
                self.change(qp, QpChange::ReadyToSend(sending))?;
            }
        }
        for _ in 0..1 + rng.below(6) {
            let qp = match rng.below(8) {
                0 => QpId(rng.below(24) as u32),
                1 => pick(&self.qps, rng)?,
                _ => pick(&self.roce.qps, rng)?,
            };
            let change = self.odd_change(rng);
            self.change(qp, change)?;
            if rng.below(3) == 0 {
                self.post(rng);
            }
        }
        self.misuse_ports(rng)
    }

    /// Listens on ports, connects to them, and answers requests that do not exist.
    fn misuse_ports(&mut self, rng: &mut Rng) -> Option<()> {
        let any = match rng.below(3) {
            0 => [0, 0, 0, 0],
            1 => [127, 0, 0, 1],
            _ => [127, 0, 0, 1 + rng.below(9) as u8],
        };
        let address = SocketAddr::from((any, [0, 7471, 4791][rng.below(3) as usize]));
        let context = rng.word();
        let v6_only = rng.below(2) == 0;
        let space = [PortSpace::Tcp, PortSpace::Udp, PortSpace::Ib][rng.below(3) as usize];
        let bind = match rng.below(2) {
            0 => RequestBody::BindDatagrams { address, context, v6_only },
            _ => RequestBody::BindRc { space, address, context, v6_only },
        };
        if let Ok(ReplyBody::Listener { listener, address }) = self.raw.try_call(bind, &[])? {
            self.roce.ports.push((listener, address));
        }
        for _ in 0..rng.below(5) {
            let qp = if rng.below(4) == 0 { &self.qps } else { &self.roce.qps };
            let qp = pick(qp, rng)?;
            let (listener, at) = pick(&self.roce.ports, rng).unwrap_or((ListenerId(1), address));
            let ip = pick(&self.roce.gids, rng).map_or(at.ip(), |gid| gid.address());
            let private_data =
                vec![7; [0, 56, 57, 136, 137, 180, 181, 196, 197][rng.below(9) as usize]];
            let request = RequestId(rng.below(64) as u32);
            let ird = Some(rng.word() as u16);
            let ord = None;
            let offer = odd_offer(rng);
            let body = match rng.below(14) {
                8..=9 => {
                    let peer = SocketAddr::new(ip, at.port());
                    let local = (rng.below(4) == 0).then_some(at);
                    RequestBody::ConnectRc { qp, space, peer, local, offer, private_data }
                }
                10..=11 => RequestBody::AcceptRc { request, qp, offer, private_data },
                12..=13 => RequestBody::EstablishRc { qp },
                0..=1 => RequestBody::Listen { listener, backlog: 1 + rng.below(3) as u32 },
                2 => RequestBody::Accept { request, qp, ird, ord, private_data },
                3 => RequestBody::Reject { request, private_data },
                4 => RequestBody::Disconnect { qp, mode: DisconnectMode::Abort },
                _ => {
                    let peer = SocketAddr::new(ip, at.port());
                    let local = (rng.below(4) == 0).then_some(at);
                    RequestBody::Connect { qp, peer, local, ird, ord, private_data }
                }
            };
            let _ = self.raw.try_call(body, &[])?;
        }
        Some(())
    }

    /// Creates a QP and adds its queues to the common lists. Returns false if the daemon refuses
    /// it.
    fn make_roce_qp(&mut self, rng: &mut Rng) -> Option<bool> {
        let mut request = qp_request(self.pd, pick(&self.cqs, rng)?);
        request.kind = match rng.below(4) {
            0 => QpType::Ud,
            1 => QpType::Uc,
            _ => QpType::Rc,
        };
        request.signal_all = rng.below(2) == 0;
        request.srq = pick(&self.srqs, rng).filter(|_| rng.below(4) == 0);
        let made = self.raw.try_call(RequestBody::CreateQp(request), &[])?;
        let Ok(ReplyBody::Qp { qp, sq, rq, .. }) = made else { return Some(false) };
        self.roce.qps.push(qp);
        // Other misuse may pick this QP, just as the misuse in this module may pick iWARP QPs.
        self.qps.push(qp);
        self.add_queue(sq);
        rq.into_iter().for_each(|rq| self.add_queue(rq));
        Some(true)
    }

    fn change(&mut self, qp: QpId, change: QpChange) -> Option<()> {
        let _ = self.raw.try_call(RequestBody::ModifyQp { qp, change }, &[])?;
        Some(())
    }

    fn honest(&self, peer: QpId) -> Wiring {
        let gid = self.roce.gids.first().copied().unwrap_or_default();
        Wiring {
            local: gid,
            remote: gid,
            remote_qp: peer,
            rq_psn: 7,
            path_mtu: 1024,
            min_rnr_timer: 1,
            ird: 4,
            rights: Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC,
        }
    }

    /// Returns a QP change in which usually one field is invalid.
    fn odd_change(&self, rng: &mut Rng) -> QpChange {
        match rng.below(12) {
            0..=3 => {
                let peer = pick(&self.roce.qps, rng).unwrap_or(QpId(7));
                let mut wiring = self.honest(peer);
                match rng.below(10) {
                    0 => wiring.local = odd_gid(rng),
                    1 => wiring.remote = odd_gid(rng),
                    2 => wiring.remote_qp = QpId(rng.word() as u32 >> rng.below(32)),
                    3 => wiring.rq_psn = rng.word() as u32 >> rng.below(32),
                    4 => wiring.path_mtu = rng.word() as u16,
                    5 => wiring.min_rnr_timer = rng.word() as u8,
                    6 => wiring.ird = [0, 1, 128, u16::MAX][rng.below(4) as usize],
                    7 => wiring.rights = odd_rights(rng),
                    8 => wiring.local = pick(&self.roce.gids, rng).unwrap_or_default(),
                    // Correct values, but the QP may be in any state.
                    _ => {}
                }
                QpChange::ReadyToReceive(wiring)
            }
            4..=5 => QpChange::ReadyToSend(Sending {
                sq_psn: [7, 0, 8, u32::MAX, 1 << 24][rng.below(5) as usize],
                timeout: [0, 1, 14, 31, 32, u8::MAX][rng.below(6) as usize],
                retry_count: [0, 7, 8, u8::MAX][rng.below(4) as usize],
                rnr_retry: [0, 1, 7, 8, u8::MAX][rng.below(5) as usize],
                ord: [0, 1, 128, u16::MAX][rng.below(4) as usize],
            }),
            6 => QpChange::DrainSendQueue,
            7 => QpChange::Reset,
            8 => QpChange::Rights(odd_rights(rng)),
            9 => QpChange::QKey(odd_key(rng)),
            10 => QpChange::ReceiveDatagrams { q_key: odd_key(rng) },
            _ => QpChange::MinRnrTimer(rng.word() as u8 >> rng.below(8)),
        }
    }
}

/// Returns a Q_Key that others may use, or a random one.
fn odd_key(rng: &mut Rng) -> u32 {
    match rng.below(2) {
        0 => rng.below(3) as u32,
        _ => rng.word() as u32,
    }
}

/// Returns a local, documentation, unspecified or random GID.
fn odd_gid(rng: &mut Rng) -> Gid {
    let mut bytes = [0; 16];
    match rng.below(4) {
        0 => {}
        1 => bytes[10..].copy_from_slice(&[0xFF, 0xFF, 127, 0, 0, 1 + rng.below(9) as u8]),
        2 => bytes[10..].copy_from_slice(&[0xFF, 0xFF, 192, 0, 2, 1]),
        _ => rng.fill(&mut bytes),
    }
    Gid(bytes)
}

/// Returns random access rights, including some that a peer cannot have.
fn odd_rights(rng: &mut Rng) -> Access {
    let some = [Access::LOCAL_WRITE, Access::REMOTE_WRITE, Access::REMOTE_READ];
    let mut rights = Access::empty();
    for right in some.into_iter().chain([Access::REMOTE_ATOMIC, Access::MW_BIND]) {
        rights.set(right, rng.below(2) == 0);
    }
    rights
}

/// Returns connection parameters, mostly out of range.
fn odd_offer(rng: &mut Rng) -> RcOffer {
    RcOffer {
        psn: rng.word() as u32 >> rng.below(9),
        responder_resources: rng.word() as u8,
        initiator_depth: rng.word() as u8,
        retry_count: rng.below(9) as u8,
        rnr_retry: rng.below(9) as u8,
        path_mtu: [1024, 4096, rng.word() as u16][rng.below(3) as usize],
        traffic_class: rng.word() as u8,
        srq: rng.below(2) == 0,
    }
}
