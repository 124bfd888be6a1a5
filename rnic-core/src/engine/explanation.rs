//! Reasons in words: which rule was broken, what happened, and what it is about.

use super::reason::Reason;
use crate::ddp;
use crate::device::cq::CqFault;
use crate::device::srq::SrqFault;
use crate::device::stag::{InvalidateFault, LocalFault, Principal, RemoteFault, StagTable};
use crate::engine::numbers::ulpdu_len;
use crate::rdmap::{Layout, ReadRequest, Terminate, codes};
use crate::types::{ATOMIC_LEN, Access, Scope, Stag, TerminateCode};

/// What an operator is told of a failure.
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
        (self.stag, self.offset, self.length) = (Some(stag), Some(offset), Some(length));
        self
    }
}

impl Reason {
    pub(super) fn explain(self, who: &Principal, stags: &StagTable) -> Explanation {
        let wire = |text: String| Explanation::new(rule_of(self.fault().code), text);
        match self {
            Reason::Entry(malformed) => {
                Explanation::new(ENTRY, format!("the entry in the queue is malformed: {malformed}"))
            }
            Reason::Opcode(opcode) => {
                Explanation::new(ENTRY, format!("no operation of a send queue has number {opcode}"))
            }
            Reason::SpareFlags(flags) => Explanation::new(
                ENTRY,
                format!("flags {flags:#x} or parameters that this operation does not have"),
            ),
            Reason::MalformedReceive => {
                Explanation::new(ENTRY, "the next entry of the receive queue is malformed")
            }
            Reason::BindElements => Explanation::new(
                ENTRY,
                "binding a window takes no elements, no inline data and no remote address",
            ),
            Reason::Bind { fault, window, address, length } => Explanation::new(
                BIND,
                format!(
                    "window {window} was to be bound to {length} bytes at {address:#x}: {fault}"
                ),
            )
            .about(window, address, length),
            Reason::ReadSink { elements } => Explanation::new(
                "RFC 5040 section 4.4: a Read Request names one sink buffer",
                format!("an RDMA Read takes one element and no inline data, {elements} were given"),
            ),
            Reason::AtomicSink { elements, bytes } => Explanation::new(
                "RFC 7306 section 5: an atomic operation answers with eight bytes",
                format!(
                    "an atomic operation takes one element of 8 bytes and no inline data, \
                     {elements} of {bytes} bytes in sum were given"
                ),
            ),
            Reason::Unreliable => Explanation::new(
                "IBTA specification, volume 1, section 9.8: an unreliable connection",
                "a queue pair without acknowledgements has Sends and RDMA Writes only",
            ),
            Reason::NoDatagram => Explanation::new(
                "IBTA specification, volume 1, section 9.8.3: unreliable datagrams",
                "a queue pair of datagrams has Sends only, and none that invalidates",
            ),
            Reason::DatagramLength { len, mtu } => Explanation::new(
                "IBTA specification, volume 1, section 9.8.3.1: a datagram is one packet",
                format!("a datagram of {len} bytes was posted, and a packet has {mtu} at most"),
            ),
            Reason::DatagramSource { index } => Explanation::new(
                "local contract: a datagram comes from a port that the table of GIDs has",
                format!("a datagram was posted from GID index {index}, or with spare bits set"),
            ),
            Reason::DatagramForbidden { to } => Explanation::new(
                "[[connect]] and [[listen]] of the configuration say who may go where; there is no \
                 multicast",
                format!(
                    "the rules do not let this user send datagrams to {to}, or it is no host's"
                ),
            ),
            Reason::NoExtensions => Explanation::new(
                "RFC 7306 section 4.1: extensions are of RDMAP version 1",
                "the peer speaks RDMAC's version of RDMAP, which has neither atomic operations nor \
                 Immediate Data",
            ),
            Reason::NoImmediateSends => Explanation::new(
                "RFC 7306 section 6: immediate data are a message behind an RDMA Write",
                "Sends with immediate data go between queue pairs that are wired by hand only",
            ),
            Reason::NoOrd => Explanation::new(
                "local contract: RDMA Reads and atomic operations need an ORD of at least 1",
                "an RDMA Read or atomic operation was posted, but this connection was agreed with \
                 an ORD of 0",
            ),
            Reason::MessageLength => Explanation::new(
                "RFC 5041 section 5.2: a message is shorter than 2^32 bytes",
                "the elements of the request add up to 2^32 bytes or more",
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
                local_key(who, stags, fault, Stag(lkey), addr, len.into(), write)
            }
            Reason::NotOwned { fault, stag } => {
                let text = format!(
                    "STag {stag} is no enabled region of session {} in PD {} that QP {} may \
                     invalidate: {fault}",
                    who.session, who.pd, who.qp
                );
                let rule = "local contract: a queue pair invalidates STags of its own session, \
                            domain and scope";
                Explanation { stag: Some(stag), ..Explanation::new(rule, text) }
            }
            Reason::NoAcknowledgement => {
                Explanation::new(SILENCE, "nobody acknowledged the request in time")
            }
            Reason::ReceiverNotReady => Explanation::new(
                "IBTA specification, volume 1, section 9.7.5.2.8: RNR NAK retries are counted",
                "the peer had no receive for the message, for as long as rnr_retry and the peer's \
                 minimum RNR NAK timer allow",
            ),
            Reason::PeerFinished => Explanation::new(
                "RFC 5040 section 6.2: no response follows the peer's end of stream",
                "the request cannot be answered: the peer has finished sending (FIN)",
            ),
            Reason::Write { fault, stag, to, len } => {
                let what = format!("an RDMA Write of {len} bytes at {to:#x}");
                let text = remote_key(who, stags, fault, stag, (to, len), &what);
                let mut words = wire(text).about(stag, to, len);
                if fault == RemoteFault::NoRight {
                    words.rule.push_str(" (DDP has no code of its own for a missing right)");
                }
                words
            }
            Reason::StagChanged { stag, to, len } => wire(format!(
                "a segment of an RDMA Write names STag {stag}, an earlier one of the same message \
                 named another"
            ))
            .about(stag, to, len),
            Reason::Read { fault, stag, to, len } => {
                let what = format!("an RDMA Read of {len} bytes at {to:#x}");
                wire(remote_key(who, stags, fault, stag, (to, len), &what)).about(stag, to, len)
            }
            Reason::Atomic { fault, stag, to } => {
                let (len, what) = (ATOMIC_LEN.into(), format!("an atomic operation at {to:#x}"));
                wire(remote_key(who, stags, fault, stag, (to, len), &what)).about(stag, to, len)
            }
            Reason::Misaligned { stag, to } => wire(format!(
                "an atomic operation at {to:#x} of STag {stag}, whose address is no multiple of 8 \
                 (RFC 7306 section 5)"
            ))
            .about(stag, to, ATOMIC_LEN.into()),
            Reason::Revoked { stag, to, len } => wire(format!(
                "STag {stag} was deregistered or invalidated while an RDMA Read of it was being \
                 answered; {len} bytes from {to:#x} on were still to be sent"
            ))
            .about(stag, to, len),
            Reason::RequestsFull { ird } => wire(format!(
                "the peer has more requests outstanding than the IRD of {ird} that was agreed"
            )),
            Reason::Invalidate { fault, stag } => {
                let why = match (fault, stags.get(stag)) {
                    (InvalidateFault::Shared, _) => {
                        "it is shared by all queue pairs of the domain, or has windows bound to it; only \
                         one limited to this queue pair can be invalidated by the peer"
                            .to_owned()
                    }
                    (_, None) => "no region has it".to_owned(),
                    (_, Some(_)) => format!("it is not associated with QP {} alone", who.qp),
                };
                let text = format!("a Send asked to invalidate STag {stag}, but {why}");
                Explanation { stag: Some(stag), ..wire(text) }
            }
            Reason::NoReceive { waited } => {
                let until = if waited { ", nor was one until the deadline" } else { "" };
                wire(format!("a Send arrived and no receive was posted to take it{until}"))
            }
            Reason::TooLong { mo, len, capacity } => {
                let end = u64::from(mo) + len as u64;
                let text = format!(
                    "a Send is at least {end} bytes long, the receive it met has {capacity}"
                );
                Explanation { length: Some(end), ..wire(text) }
            }
            Reason::NoRequest { atomic } => {
                let which = if atomic { "an Atomic" } else { "a Read" };
                wire(format!("{which} Response arrived and answers nothing that was outstanding"))
            }
            Reason::OtherSink { found, sink } => {
                let text = format!(
                    "a Read Response names STag {found}, the read's own buffer is STag {sink}"
                );
                Explanation { stag: Some(found), ..wire(text) }
            }
            Reason::OutsideSink { stag, to, len, size } => wire(format!(
                "a Read Response of {len} bytes at {to:#x} leaves the {size} bytes the read asked \
                 for"
            ))
            .about(stag, to, len),
            Reason::ResponseLength { received, size } => {
                let text =
                    format!("the peer answered a read of {size} bytes with {received} bytes");
                Explanation { length: Some(received), ..wire(text) }
            }
            Reason::SinkGone { stag, to, size } => wire(format!(
                "STag {stag}, the buffer of a request, was deregistered or invalidated before the \
                 response came"
            ))
            .about(stag, to, size.into()),
            Reason::Segment => wire("the peer's segment is wrong in itself".to_owned()),
            Reason::Memory(fault) => {
                let whose = match fault.owner == who.session {
                    true => "memory of this session",
                    false => "memory of the other end's session",
                };
                Explanation::new(
                    "local contract: memory stays as it was when it was shared or attached",
                    format!("{whose} could not be reached: {}", fault.cause),
                )
            }
            Reason::Srq(srq, SrqFault::BadIndex(fault)) => {
                Explanation::new(INDEX, format!("shared receive queue {srq}: {fault}"))
            }
            Reason::Srq(srq, SrqFault::Dead) => Explanation::new(
                INDEX,
                format!("shared receive queue {srq} was scribbled over before"),
            ),
            Reason::AdminDisconnect => {
                Explanation::new("rnicctl disconnect", "an administrator ended this connection")
            }
            Reason::Cq(cq, CqFault::Full) => Explanation::new(
                "RFC 5042 section 6.4.3.2: a completion queue that overflows is disabled, with its \
                 queue pairs",
                format!("completion queue {cq} had no free entry for the completion of a receive"),
            ),
            Reason::Cq(cq, CqFault::Dead) => Explanation::new(
                "RFC 5042 section 6.4.3.2: a completion queue that overflows is disabled, with its \
                 queue pairs",
                format!("completion queue {cq} overflowed or was scribbled over before"),
            ),
            Reason::Cq(cq, CqFault::BadIndex(fault)) => {
                Explanation::new(INDEX, format!("completion queue {cq}: {fault}"))
            }
            Reason::Queue(queue, fault) => Explanation::new(INDEX, format!("{queue}: {fault}")),
            Reason::CutShort => wire("the peer closed its direction inside of an FPDU".to_owned()),
        }
    }
}

const ENTRY: &str = "local contract: entries of a queue follow the layout of the ABI";
const BIND: &str = "local contract: a window is bound within a region of the same session and domain \
                    that allows it";
const INDEX: &str = "local contract: a client moves an index only forward and within its ring";
const LOCAL_KEY: &str = "local contract: a local key names a region of the same session and domain \
                         that covers the range, with local-write where bytes arrive";
/// Of requests that nobody acknowledges.
pub(super) const SILENCE: &str =
    "IBTA specification, volume 1, section 9.7.6.1.3: retries without an answer are counted";
pub(super) const DATAGRAMS: &str =
    "IBTA specification, volume 1, section 9.8.3: what is wrong with a datagram drops it";
pub(super) const LOST: &str = "RFC 5040 section 6.2: a stream ends with its TCP connection";
pub(super) const FLUSHED: &str =
    "local contract: what is posted and cannot complete any more is flushed";

/// The rule behind a Terminate code.
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
    who: &Principal,
    stags: &StagTable,
    fault: LocalFault,
    key: Stag,
    addr: u64,
    len: u64,
    write: bool,
) -> Explanation {
    let way = if write { "written to" } else { "read from" };
    let mut text = format!("{len} bytes at {addr:#x} were to be {way} local key {key}, ");
    // Of another session's region nothing is said, not even that it exists.
    let own = stags.get(key).filter(|e| e.session == who.session);
    text += &match (fault, own) {
        (LocalFault::InvalidKey, None) => {
            format!("but session {} has no such region", who.session)
        }
        (LocalFault::InvalidKey, Some(e)) if e.pd != who.pd => {
            format!("but that region is of PD {} and QP {} of PD {}", e.pd, who.qp, who.pd)
        }
        (LocalFault::InvalidKey, Some(_)) => {
            format!("but that region is limited to another queue pair than QP {}", who.qp)
        }
        (LocalFault::NoRight, Some(e)) => format!("which grants {} only", grants(e.access)),
        (LocalFault::Bounds, Some(e)) => {
            format!("which covers {} bytes from {:#x} on", e.length, e.iova)
        }
        (fault, _) => fault.to_string(),
    };
    Explanation::new(LOCAL_KEY, text).about(key, addr, len)
}

fn remote_key(
    who: &Principal,
    stags: &StagTable,
    fault: RemoteFault,
    stag: Stag,
    (to, len): (u64, u64),
    what: &str,
) -> String {
    let entry = stags.get(stag);
    // Of another session's region nothing is said but that it is not this stream's.
    let own = entry.filter(|e| e.session == who.session);
    match (fault, own) {
        (RemoteFault::InvalidStag, _) => format!(
            "no region has STag {stag}: it was never issued, or has been deregistered or \
             invalidated; {what} was asked for"
        ),
        (RemoteFault::NotAssociated, Some(e)) if e.pd != who.pd => {
            let (theirs, ours) = (e.pd, who.pd);
            format!("STag {stag} is of PD {theirs}, this stream of PD {ours}; {what} was asked for")
        }
        (RemoteFault::NotAssociated, _) => {
            let limit = match own.map(|e| e.scope) {
                Some(Scope::Qp(other)) => format!("is limited to QP {other}"),
                _ => "is not associated with this stream".to_owned(),
            };
            format!(
                "STag {stag} {limit}; QP {} of PD {} is this; {what} was asked for",
                who.qp, who.pd
            )
        }
        (RemoteFault::NoRight, _) => {
            let grants = entry.map_or(String::new(), |e| grants(e.access));
            format!("STag {stag} of PD {} grants {grants} only; {what} was asked for", who.pd)
        }
        (RemoteFault::NotEnabled, _) => format!(
            "QP {} does not allow it, whatever STag {stag} grants (qp_access_flags); {what} was \
             asked for",
            who.qp
        ),
        (RemoteFault::Wrap, _) => format!(
            "offset {to:#x} and length {len} reach 2^64; {what} of STag {stag} was asked for"
        ),
        (RemoteFault::Bounds, _) => {
            let (from, size) = entry.map_or((0, 0), |e| (e.iova, e.length));
            format!("STag {stag} covers {size} bytes from {from:#x} on; {what} leaves it")
        }
    }
}

/// Rights by name. Local reading goes without saying, but something must be said.
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

/// What a Terminate says it is about, from the headers it encloses.
pub(super) fn about(t: &Terminate<'_>, mut words: Explanation) -> Explanation {
    if let Some(read) = t.read_request.map(ReadRequest::parse) {
        let ReadRequest { src_stag, src_to, size, .. } = read;
        words.text += &format!(
            "; it is about an RDMA Read of {size} bytes at {:#x} of STag {src_stag}",
            src_to.0
        );
        return words.about(src_stag, src_to.0, size.into());
    }
    let payload = |header: &ddp::Header| match (t.segment_len.unwrap_or(0), t.layout) {
        (len, Layout::Rfc5040) => len.saturating_sub(ulpdu_len(header.len())),
        // siw leaves the header out of the length.
        (len, Layout::Siw) => len,
    };
    match t.ddp_header.map(ddp::Header::parse) {
        Some(Ok((header @ ddp::Header::Tagged(h), _))) => {
            let len = payload(&header);
            words.text += &format!(
                "; it is about a tagged segment of {len} bytes at {:#x} of STag {}",
                h.to.0, h.stag
            );
            words.about(h.stag, h.to.0, len.into())
        }
        Some(Ok((header @ ddp::Header::Untagged(h), _))) => {
            let len = payload(&header);
            words.text += &format!(
                "; it is about a segment of {len} bytes at offset {} of message {} on queue {}",
                h.mo, h.msn.0, h.qn
            );
            Explanation { offset: Some(h.mo.into()), length: Some(len.into()), ..words }
        }
        _ => words,
    }
}
