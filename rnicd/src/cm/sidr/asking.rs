//! Asking which queue pair serves a port: the request is sent again, after longer and longer
//! pauses, until there is a reply or the time is over.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::time::Duration;

use rnic_core::abi::control::Refusal;
use rnic_core::roce::is_a_host;
use rnic_core::roce::sidr::{self, Exchange, Reply, Request, ServiceId, Status, filled_up};
use rnic_core::types::{AddressPair, QpId, SessionId, Time};
use rustix::io::Errno;

use super::asked::too_long;
use crate::cm::{CmEvent, ConnectParams, ConnectionManager, NoConnection, Slot, net};
use crate::config::Span;
use crate::system;

/// A question that has no answer yet.
#[derive(Debug)]
pub struct Asking {
    pub(in crate::cm) session: SessionId,
    pub(in crate::cm) qp: QpId,
    exchange: Exchange,
    addresses: AddressPair,
    /// Index of the device's GID that it comes from.
    source: u16,
    request: Box<sidr::Bytes>,
    /// Until it is asked once more.
    pause: Duration,
    until: Time,
}

impl ConnectionManager {
    /// Asks for the queue pair that serves a port. The outcome is an event, unless our own end
    /// already makes it impossible.
    pub fn resolve(&mut self, params: ConnectParams, now: Time) -> Result<(), Refusal> {
        self.check_idle(params.qp)?;
        let data = filled_up(&params.private_data)
            .ok_or_else(|| too_long(&params.private_data, sidr::REQUEST_DATA))?;
        let peer = net::canonical(params.peer);
        let what = |e: &io::Error| system::refusal(&format!("ask {peer} for a queue pair"), e);
        if !is_a_host(peer.ip()) {
            return Err(what(&Errno::NETUNREACH.into()));
        }
        let mut local = self.source_of(params.local, peer).map_err(|e| what(&e))?;
        let none = || what(&Errno::ADDRNOTAVAIL.into());
        let source = self.sidr.index_of(local.ip()).ok_or_else(none)?;
        if local.port() == 0 {
            local.set_port(self.free_port().ok_or_else(none)?);
        }
        let key = self.slots.vacant_key();
        // There are never so many: each is of another queue pair.
        let id = u32::try_from(key).unwrap_or(u32::MAX);
        let exchange = Exchange { transaction: self.sidr.draw(), id };
        let service = ServiceId::of_port(peer.port());
        let request = Request { exchange, service, from: local, to: peer.ip(), private_data: data };
        self.insert(Slot::Asking(Box::new(Asking {
            session: params.session,
            qp: params.qp,
            exchange,
            addresses: AddressPair { local, peer },
            source,
            request: Box::new(request.emit()),
            pause: FIRST_PAUSE,
            until: now.after(self.options.reply_deadline),
        })));
        self.qps.insert(params.qp, key);
        self.ask(key, now);
        Ok(())
    }

    /// The address that a request comes from, with the port if one was named.
    fn source_of(&self, named: Option<SocketAddr>, peer: SocketAddr) -> io::Result<SocketAddr> {
        let named = named.map(net::canonical);
        let port = named.map_or(0, |named| named.port());
        let ip = match named.map(|named| named.ip()) {
            Some(ip) if ip.is_ipv4() != peer.is_ipv4() => return Err(Errno::AFNOSUPPORT.into()),
            Some(ip) if !ip.is_unspecified() => ip,
            _ if self.sidr.index_of(peer.ip()).is_some() => peer.ip(),
            _ => {
                let towards = towards(peer.ip())?;
                // Where the device has other addresses than the route, one of its own is as good.
                match self.sidr.index_of(towards) {
                    Some(_) => towards,
                    None => self.sidr.first_like(towards).unwrap_or(towards),
                }
            }
        };
        Ok(SocketAddr::new(ip, port))
    }

    /// Its time has come: asks once more, or gives up.
    pub(in crate::cm) fn ask_again(&mut self, key: usize, now: Time) {
        let Slot::Asking(asking) = &self.slots[key].slot else { return };
        if now < asking.until {
            return self.ask(key, now);
        }
        let AddressPair { peer, .. } = asking.addresses;
        let why = format!(
            "nobody at {} said which queue pair of datagrams serves port {} before the deadline \
             (mpa.reply_deadline = {})",
            peer.ip(),
            peer.port(),
            Span(self.options.reply_deadline)
        );
        self.end_asking(key, |qp| CmEvent::Unreachable { qp, why: NoConnection::timed_out(why) });
    }

    fn ask(&mut self, key: usize, now: Time) {
        let Slot::Asking(asking) = &mut self.slots[key].slot else { return };
        let at = now.after(asking.pause).min(asking.until);
        asking.pause = (asking.pause * 2).min(LONGEST_PAUSE);
        let AddressPair { local, peer } = asking.addresses;
        let request = *asking.request;
        self.set_deadline(key, Some(at));
        self.send_message(local.ip(), peer.ip(), request, now);
    }

    /// A reply has come. One to no question of ours is of no account.
    pub(super) fn was_answered(&mut self, from: IpAddr, to: IpAddr, reply: &Reply) {
        let Reply { exchange, status, qp: remote_qp, q_key, .. } = *reply;
        let Ok(key) = usize::try_from(exchange.id) else { return };
        let Some(Slot::Asking(asking)) = self.slots.get(key).map(|entry| &entry.slot) else {
            return;
        };
        let AddressPair { local, peer } = asking.addresses;
        if asking.exchange != exchange || (peer.ip(), local.ip()) != (from, to) {
            return;
        }
        let source = asking.source;
        // Datagrams go between ports: their GIDs are those of these addresses.
        let port = |at: SocketAddr| SocketAddr::new(self.sidr.port_of(at.ip()), at.port());
        let addresses = AddressPair { local: port(local), peer: port(peer) };
        let private_data = reply.private_data.to_vec();
        self.end_asking(key, |qp| match status {
            Status::VALID if remote_qp.0 > sidr::QP.0 => {
                CmEvent::Resolved { qp, addresses, source, remote_qp, q_key, private_data }
            }
            Status::VALID => {
                let why = format!("{from} says that queue pair {remote_qp} serves the port");
                CmEvent::Unreachable { qp, why: NoConnection::protocol(why) }
            }
            Status::REJECTED => CmEvent::Rejected { qp, private_data },
            Status::UNSUPPORTED => {
                let port = peer.port();
                let why = format!("nobody at {from} listens for datagrams at port {port}");
                CmEvent::Unreachable { qp, why: NoConnection::refused(why) }
            }
            Status(other) => {
                let why = format!("{from} answers with status {other} and no queue pair");
                CmEvent::Unreachable { qp, why: NoConnection::protocol(why) }
            }
        });
    }

    fn end_asking(&mut self, key: usize, event: impl FnOnce(QpId) -> CmEvent) {
        if let Some(Slot::Asking(asking)) = self.remove(key) {
            self.events.push_back(event(asking.qp));
        }
    }

    /// Nobody waits for the answer any more. What is undecided in this daemon is withdrawn; another
    /// one's question is not taken back, but ends at its own deadline.
    pub(in crate::cm) fn give_up_asking(&mut self, asking: &Asking) {
        let AddressPair { local, peer } = asking.addresses;
        if self.sidr.stay_here(local.ip(), peer.ip()) {
            self.withdraw_near(local.ip(), asking.exchange, "the requester gave up");
        }
    }
}

/// The address that the kernel has for packets to this one, without sending any.
fn towards(peer: IpAddr) -> io::Result<IpAddr> {
    let any: IpAddr = match peer {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let probe = UdpSocket::bind((any, 0))?;
    // Nothing listens at that port; the kernel finds a route all the same.
    probe.connect((peer, 9))?;
    Ok(probe.local_addr()?.ip())
}

/// Before a request is sent for the second time; each pause is twice the one before.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(4);
