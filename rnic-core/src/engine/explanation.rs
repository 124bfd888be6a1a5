//! Texts for reasons: the rule that was broken, a description, and the memory concerned.

use super::fault_rules::rule_of_fault;
use super::reason::{Effect, Reason};
use crate::ddp;
use crate::device::cq::CqFault;
use crate::device::srq::SrqFault;
use crate::device::stag::{InvalidateFault, LocalFault, Principal, RemoteFault, StagTable};
use crate::engine::numbers::ulpdu_len;
use crate::rdmap::{Layout, ReadRequest, Terminate, codes};
use rnic_abi::types::{ATOMIC_LEN, Access, Scope, Stag, TerminateCode};

/// Description of a failure for operators and programs.
pub(super) struct Explanation {
    pub rule: String,
    pub text: String,
    pub stag: Option<Stag>,
    pub offset: Option<u64>,
    pub length: Option<u64>,
}

impl Explanation {
    pub(super) fn new(rule: impl Into<String>, text: impl Into<String>) -> Self {
        Explanation { rule: rule.into(), text: text.into(), stag: None, offset: None, length: None }
    }

    fn about(mut self, stag: Stag, offset: u64, length: u64) -> Self {
        self.stag = Some(stag);
        self.offset = Some(offset);
        self.length = Some(length);
        self
    }
}

impl Reason {
    pub(super) fn explain(self, principal: &Principal, stags: &StagTable) -> Explanation {
        let wire = |text: String| Explanation::new(rule_of(self.fault().code), text);
        match self {
            Reason::Entry(malformed) => {
                Explanation::new(ENTRY, format!("the entry in the queue is malformed: {malformed}"))
            }
            Reason::Opcode(opcode) => {
                Explanation::new(ENTRY, format!("opcode number {opcode} is not a send operation"))
            }
            Reason::UnsupportedFlags(flags) => Explanation::new(
                ENTRY,
                format!(
                    "the request has flags {flags:#x} or parameters that its operation does \
                     not support"
                ),
            ),
            Reason::MalformedReceive => {
                Explanation::new(ENTRY, "the next entry of the receive queue is malformed")
            }
            Reason::BindSges => Explanation::new(
                ENTRY,
                "binding a window takes no SGEs, no inline data and no remote address",
            ),
            Reason::Bind { fault, window, address, length } => Explanation::new(
                BIND,
                format!("cannot bind window {window} to {length} bytes at {address:#x}: {fault}"),
            )
            .about(window, address, length),
            Reason::ReadSink { elements } => Explanation::new(
                "RFC 5040 section 4.4: a Read Request names one sink buffer",
                format!(
                    "an RDMA Read takes no inline data and one SGE (several on RC \
                     if not invalidating); {elements} SGEs were given"
                ),
            ),
            Reason::AtomicSink { elements, bytes } => Explanation::new(
                "RFC 7306 section 5: the response to an atomic operation has eight bytes",
                format!(
                    "an atomic operation takes one SGE of 8 bytes and no inline data; \
                     {elements} SGEs with {bytes} bytes in total were given"
                ),
            ),
            Reason::Unreliable => Explanation::new(
                "IBTA specification, volume 1, section 9.8: unreliable connection",
                "a UC queue pair supports no RDMA Reads, atomics or Sends with Invalidate",
            ),
            Reason::NoDatagram => Explanation::new(
                "IBTA specification, volume 1, section 9.8.3: unreliable datagram",
                "a UD queue pair supports only Sends, without invalidation",
            ),
            Reason::DatagramLength { len, mtu } => Explanation::new(
                "IBTA specification, volume 1, section 9.8.3.1: a datagram is one packet",
                format!("the datagram has {len} bytes; a packet carries at most {mtu}"),
            ),
            Reason::DatagramSource { index } => Explanation::new(
                "local contract: the source of a datagram is an entry of the GID table",
                format!("a datagram was posted from GID index {index}, or with reserved bits set"),
            ),
            Reason::DatagramForbidden { to } => Explanation::new(
                "[[connect]] and [[listen]] of the configuration select the permitted addresses; \
                 multicast is not supported",
                format!(
                    "the rules do not permit this user to send datagrams to {to}, or {to} is not \
                     a unicast address"
                ),
            ),
            Reason::NoExtensions => Explanation::new(
                "RFC 7306 section 4.1: extensions need RDMAP version 1",
                "the peer uses RDMAC's version of RDMAP, which has neither atomic operations nor \
                 Immediate Data",
            ),
            Reason::NoImmediateSends => Explanation::new(
                "RFC 7306 section 6: Immediate Data is a message after an RDMA Write",
                "Sends with immediate data work only between queue pairs of the RoCE device",
            ),
            Reason::NoOrd => Explanation::new(
                "local contract: RDMA Reads and atomic operations need an ORD of at least 1",
                "an RDMA Read or atomic operation was posted, but the ORD of this connection is \
                 0",
            ),
            Reason::MessageLength => Explanation::new(
                "RFC 5041 section 5.2: a message is shorter than 2^32 bytes",
                "the SGEs of the request add up to 2^32 bytes or more",
            ),
            Reason::MessageTooLong { len, most } => Explanation {
                length: Some(len.into()),
                ..Explanation::new(
                    "IBTA specification, volume 1, section 11.6.2: local length error",
                    format!(
                        "the message has {len} bytes, and the port sends at most {most} \
                             (max_msg_sz)"
                    ),
                )
            },
            Reason::LocalKey { fault, lkey, addr, len, write } => {
                local_key(principal, stags, fault, Stag(lkey), addr, len.into(), write)
            }
            Reason::NotOwned { fault, stag } => {
                let text = format!(
                    "STag {stag} is not an enabled region of session {} in PD {} that QP {} may \
                     invalidate: {fault}",
                    principal.session, principal.pd, principal.qp
                );
                let rule = "local contract: a queue pair invalidates STags of its own session, \
                            domain and scope";
                Explanation { stag: Some(stag), ..Explanation::new(rule, text) }
            }
            Reason::NoAcknowledgement => Explanation::new(
                RETRIES_EXCEEDED,
                "the peer did not acknowledge the request in time",
            ),
            Reason::ReceiverNotReady => Explanation::new(
                "IBTA specification, volume 1, section 9.7.5.2.8: RNR NAK retries are counted",
                "the peer had no receive for the message for as long as rnr_retry and the peer's \
                 minimum RNR NAK timer allow",
            ),
            Reason::PeerFinished => Explanation::new(
                "RFC 5040 section 6.2: no response follows the peer's end of stream",
                "the request cannot be answered: the peer has finished sending (FIN)",
            ),
            Reason::Write { fault, stag, to, len } => {
                let what = format!("an RDMA Write of {len} bytes at {to:#x}");
                let text = remote_key(principal, stags, fault, stag, to, len, &what);
                let mut explanation = wire(text).about(stag, to, len);
                if fault == RemoteFault::NoRight {
                    explanation.rule.push_str(" (DDP has no separate code for a missing right)");
                }
                explanation
            }
            Reason::StagChanged { stag, to, len } => wire(format!(
                "a segment of an RDMA Write has STag {stag}, but an earlier segment of the same \
                 message has another"
            ))
            .about(stag, to, len),
            Reason::Read { fault, stag, to, len } => {
                let what = format!("an RDMA Read of {len} bytes at {to:#x}");
                wire(remote_key(principal, stags, fault, stag, to, len, &what)).about(stag, to, len)
            }
            Reason::Atomic { fault, stag, to } => {
                let len = ATOMIC_LEN.into();
                let what = format!("an atomic operation at {to:#x}");
                wire(remote_key(principal, stags, fault, stag, to, len, &what)).about(stag, to, len)
            }
            Reason::Misaligned { stag, to } => wire(format!(
                "the address {to:#x} of an atomic on STag {stag} is not a multiple of 8 \
                 (RFC 7306 section 5)"
            ))
            .about(stag, to, ATOMIC_LEN.into()),
            Reason::Revoked { stag, to, len } => wire(format!(
                "STag {stag} was deregistered or invalidated while an RDMA Read of it was being \
                 answered; {len} bytes from {to:#x} were still unsent"
            ))
            .about(stag, to, len),
            Reason::RequestsFull { ird } => wire(format!(
                "the peer has more requests outstanding than the negotiated IRD of {ird}"
            )),
            Reason::Invalidate { fault, stag } => {
                let why = match (fault, stags.get(stag)) {
                    (InvalidateFault::Shared, _) => {
                        "it is shared by all queue pairs of the domain, or has windows bound to \
                         it; the peer can invalidate only an STag limited to this queue pair"
                            .to_owned()
                    }
                    (_, None) => "no region has it".to_owned(),
                    (_, Some(_)) => format!("it is not associated with QP {} alone", principal.qp),
                };
                let text = format!("a Send asked to invalidate STag {stag}, but {why}");
                Explanation { stag: Some(stag), ..wire(text) }
            }
            Reason::NoReceive { waited } => {
                let until = if waited { " before the deadline" } else { "" };
                wire(format!("a Send arrived, but no receive was posted{until}"))
            }
            Reason::TooLong { mo, len, capacity } => {
                let end = u64::from(mo) + len as u64;
                let text =
                    format!("a Send is at least {end} bytes long, but its receive has {capacity}");
                Explanation { length: Some(end), ..wire(text) }
            }
            Reason::NoRequest { atomic } => {
                let which = if atomic { "an Atomic" } else { "a Read" };
                wire(format!("{which} Response arrived that answers no outstanding request"))
            }
            Reason::OtherSink { found, sink } => {
                let text = format!(
                    "a Read Response has STag {found}, but the buffer of the Read is STag {sink}"
                );
                Explanation { stag: Some(found), ..wire(text) }
            }
            Reason::OutsideSink { stag, to, len, size } => wire(format!(
                "a Read Response of {len} bytes at {to:#x} is outside the {size} bytes that the \
                 Read requested"
            ))
            .about(stag, to, len),
            Reason::ResponseLength { received, size } => {
                let text =
                    format!("the peer answered a Read of {size} bytes with {received} bytes");
                Explanation { length: Some(received), ..wire(text) }
            }
            Reason::SinkGone { stag, to, size } => wire(format!(
                "STag {stag}, the buffer of a request, was deregistered or invalidated before the \
                 response arrived"
            ))
            .about(stag, to, size.into()),
            Reason::Segment => wire("the peer's segment is invalid".to_owned()),
            Reason::Memory(fault) => {
                let whose = if fault.owner == principal.session {
                    "memory of this session"
                } else {
                    "memory of the peer's session"
                };
                Explanation::new(
                    "local contract: memory keeps the size and mapping with which it was shared \
                     or attached",
                    format!("{whose} could not be reached: {}", fault.cause),
                )
            }
            Reason::Srq(srq, SrqFault::BadIndex(fault)) => {
                Explanation::new(INDEX, format!("shared receive queue {srq}: {fault}"))
            }
            Reason::Srq(srq, SrqFault::Dead) => {
                Explanation::new(INDEX, format!("shared receive queue {srq} was corrupted earlier"))
            }
            Reason::AdminDisconnect => {
                Explanation::new("rnicctl disconnect", "an administrator ended this connection")
            }
            Reason::Cq(cq, CqFault::Full) => Explanation::new(
                "RFC 5042 section 6.4.3.2: a completion queue that overflows is disabled, with its \
                 queue pairs",
                format!("completion queue {cq} had no free entry for a completion"),
            ),
            Reason::Cq(cq, CqFault::Dead) => Explanation::new(
                "RFC 5042 section 6.4.3.2: a completion queue that overflows is disabled, with its \
                 queue pairs",
                format!("completion queue {cq} overflowed or was corrupted earlier"),
            ),
            Reason::Cq(cq, CqFault::BadIndex(fault)) => {
                Explanation::new(INDEX, format!("completion queue {cq}: {fault}"))
            }
            Reason::Queue(queue, fault) => Explanation::new(INDEX, format!("{queue}: {fault}")),
            Reason::Injected { fault, effect } => {
                let text = match effect {
                    Effect::Completes(_) => "the rule failed this request".to_owned(),
                    Effect::Refuses { .. } => "the rule refused a message of the peer".to_owned(),
                    Effect::Terminates(code) => format!("the rule sent Terminate {code}"),
                    Effect::Fails => "the rule ended the connection or the queue pair".to_owned(),
                };
                Explanation::new(rule_of_fault(fault), text)
            }
            Reason::CutShort => {
                wire("the peer closed its sending direction inside an FPDU".to_owned())
            }
        }
    }
}

const ENTRY: &str = "local contract: entries of a queue follow the layout of the ABI";
const BIND: &str = "local contract: a window is bound within a region of the same session and \
                    domain that allows it";
const INDEX: &str = "local contract: a client moves an index only forward and within its ring";
const LOCAL_KEY: &str = "local contract: a local key names a region of the same session and domain \
                         that covers the range, with local-write for writes";
/// Rule for requests that are not acknowledged.
pub(super) const RETRIES_EXCEEDED: &str =
    "IBTA specification, volume 1, section 9.7.6.1.3: retries without a response are counted";
pub(super) const DATAGRAMS: &str =
    "IBTA specification, volume 1, section 9.8.3: an invalid datagram is dropped";
pub(super) const LOST: &str = "RFC 5040 section 6.2: a stream ends with its TCP connection";
pub(super) const FLUSHED: &str =
    "local contract: a posted request that can no longer complete is flushed";

/// Returns the rule for a Terminate code.
pub(super) fn rule_of(code: TerminateCode) -> String {
    let section = match (code.layer, code.etype) {
        (0, 0) => "RFC 5040 section 7.1",
        (0, _) => "RFC 5040 section 7.2",
        (1, _) => "RFC 5041 section 7.1",
        _ => "RFC 5044 section 8",
    };
    match codes::name(code) {
        Some(name) => format!("{section}, {}: {name}", code.number()),
        None => format!("{section}, {code}: not an assigned code"),
    }
}

fn local_key(
    principal: &Principal,
    stags: &StagTable,
    fault: LocalFault,
    key: Stag,
    addr: u64,
    len: u64,
    write: bool,
) -> Explanation {
    let way = if write { "write" } else { "read" };
    let mut text = format!("cannot {way} through local key {key} ({len} bytes at {addr:#x}): ");
    // The text must not reveal that a region of another session exists.
    let own = stags.get(key).filter(|e| e.session == principal.session);
    text += &match (fault, own) {
        (LocalFault::InvalidKey, None) => {
            format!("session {} has no such region", principal.session)
        }
        (LocalFault::InvalidKey, Some(e)) if e.pd != principal.pd => {
            format!(
                "its region is in PD {}, but QP {} is in PD {}",
                e.pd, principal.qp, principal.pd
            )
        }
        (LocalFault::InvalidKey, Some(_)) => {
            format!("it is limited to a queue pair other than QP {}", principal.qp)
        }
        (LocalFault::NoRight, Some(e)) => format!("it grants {} only", grants(e.access)),
        (LocalFault::Bounds, Some(e)) => {
            format!("it covers {} bytes from {:#x} on", e.length, e.iova)
        }
        (fault, _) => fault.to_string(),
    };
    Explanation::new(LOCAL_KEY, text).about(key, addr, len)
}

fn remote_key(
    principal: &Principal,
    stags: &StagTable,
    fault: RemoteFault,
    stag: Stag,
    to: u64,
    len: u64,
    what: &str,
) -> String {
    let entry = stags.get(stag);
    // The text reveals only that a region of another session is not associated with this stream.
    let own = entry.filter(|e| e.session == principal.session);
    match (fault, own) {
        (RemoteFault::InvalidStag, _) => format!(
            "no region has STag {stag}: it was never issued, or has been deregistered or \
             invalidated; {what} was requested"
        ),
        (RemoteFault::NotAssociated, Some(e)) if e.pd != principal.pd => {
            let theirs = e.pd;
            let ours = principal.pd;
            format!("STag {stag} is in PD {theirs}, this stream in PD {ours}; {what} was requested")
        }
        (RemoteFault::NotAssociated, _) => {
            let limit = match own.map(|e| e.scope) {
                Some(Scope::Qp(other)) => format!("is limited to QP {other}"),
                _ => "is not associated with this stream".to_owned(),
            };
            format!(
                "STag {stag} {limit}; this is QP {} of PD {}; {what} was requested",
                principal.qp, principal.pd
            )
        }
        (RemoteFault::NoRight, _) => {
            let grants = entry.map_or(String::new(), |e| grants(e.access));
            format!("STag {stag} of PD {} grants {grants} only; {what} was requested", principal.pd)
        }
        (RemoteFault::NotEnabled, _) => format!(
            "QP {} does not permit {what} (qp_access_flags), whatever STag {stag} grants",
            principal.qp
        ),
        (RemoteFault::Wrap, _) => format!(
            "offset {to:#x} and length {len} reach 2^64; {what} of STag {stag} was requested"
        ),
        (RemoteFault::Bounds, _) => {
            let (from, size) = entry.map_or((0, 0), |e| (e.iova, e.length));
            format!("STag {stag} covers {size} bytes from {from:#x} on; {what} exceeds it")
        }
    }
}

/// Returns the names of the rights except local-read, which every region grants, or `local-read`
/// if there are no others.
fn grants(access: Access) -> String {
    let names = [
        (Access::LOCAL_WRITE, "local-write"),
        (Access::REMOTE_WRITE, "remote-write"),
        (Access::REMOTE_READ, "remote-read"),
        (Access::REMOTE_ATOMIC, "remote-atomic"),
    ];
    let held: Vec<&str> =
        names.iter().filter(|(right, _)| access.contains(*right)).map(|(_, name)| *name).collect();
    if held.is_empty() { "local-read".to_owned() } else { held.join(", ") }
}

/// Adds the memory that a Terminate concerns, taken from the headers that it encloses.
pub(super) fn about(t: &Terminate<'_>, mut words: Explanation) -> Explanation {
    if let Some(read) = t.read_request.map(ReadRequest::parse) {
        let ReadRequest { src_stag, src_to, size, .. } = read;
        words.text += &format!(
            "; it concerns an RDMA Read of {size} bytes at {:#x} of STag {src_stag}",
            src_to.0
        );
        return words.about(src_stag, src_to.0, size.into());
    }
    let payload = |header: &ddp::Header| match (t.segment_len.unwrap_or(0), t.layout) {
        (len, Layout::Rfc5040) => len.saturating_sub(ulpdu_len(header.len())),
        // The length that siw sends excludes the header.
        (len, Layout::Siw) => len,
    };
    match t.ddp_header.map(ddp::Header::parse) {
        Some(Ok((header @ ddp::Header::Tagged(h), _))) => {
            let len = payload(&header);
            words.text += &format!(
                "; it concerns a tagged segment of {len} bytes at {:#x} of STag {}",
                h.to.0, h.stag
            );
            words.about(h.stag, h.to.0, len.into())
        }
        Some(Ok((header @ ddp::Header::Untagged(h), _))) => {
            let len = payload(&header);
            words.text += &format!(
                "; it concerns a segment of {len} bytes at offset {} of message {} on queue {}",
                h.mo, h.msn.0, h.qn
            );
            Explanation { offset: Some(h.mo.into()), length: Some(len.into()), ..words }
        }
        _ => words,
    }
}
