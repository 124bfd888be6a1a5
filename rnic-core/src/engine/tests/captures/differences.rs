//! Differences between our engine and siw, each with its reason. If a recording has several
//! connections, they are numbered. Everything else is equal byte by byte.

use super::recording::Side::{self, Initiator, Responder};
use super::replay::Flaw;
use rnic_abi::types::Access;

/// A message that differs.
pub struct Difference {
    pub reason: &'static str,
    /// Connections, and the side that our engine plays.
    pub at: &'static [(&'static str, Side)],
    pub ours: &'static str,
    pub theirs: &'static str,
}

/// Recordings in which the played side has less memory or fewer receives than its traffic suggests.
pub const FLAWS: [(&str, Side, Flaw); 9] = [
    ("gen-sendseinv", Responder, Flaw::Unknown),
    ("term-read-bad-stag", Responder, Flaw::Unknown),
    ("term-read-bounds", Responder, Flaw::Unknown),
    ("term-read-noperm", Responder, Flaw::Rights(Access::LOCAL_WRITE.union(Access::REMOTE_WRITE))),
    ("term-send-nobuf", Responder, Flaw::RnrPolicy),
    ("term-send-toolong", Responder, Flaw::ShortReceive),
    ("term-write-bad-stag", Responder, Flaw::Unknown),
    ("term-write-bounds", Responder, Flaw::Unknown),
    ("term-write-noperm", Responder, Flaw::Rights(Access::LOCAL_WRITE.union(Access::REMOTE_READ))),
];

const PADS: &str =
    "siw does not clear the pad (RFC 5044 section 4.1 requires zeros, which receivers ignore)";
const LAYOUT: &str = "siw's Terminate: Layer and EType exchanged, flags misplaced, and a segment \
    length without the header; ours follows RFC 5040 section 4.8";

/// All differences.
pub const DIFFERENCES: &[Difference] = &[
    Difference {
        reason: "siw's FPDUs on loopback are at most 32 KiB, ours as large as EMSS allows",
        at: &[("gen-big-128k", Initiator)],
        ours: "RDMA Write of 131072 in 3 FPDUs",
        theirs: "RDMA Write of 131072 in 4 FPDUs",
    },
    Difference {
        reason: PADS,
        at: &[
            ("ib_read_bw-4k/0", Initiator),
            ("ib_read_bw-4k/0", Responder),
            ("ib_send_bw-4k/0", Initiator),
            ("ib_send_bw-4k/0", Responder),
            ("ib_send_lat-64/0", Initiator),
            ("ib_send_lat-64/0", Responder),
            ("ib_write_bw-4k/0", Initiator),
            ("ib_write_bw-4k/0", Responder),
            ("ib_write_lat-64/0", Initiator),
            ("ib_write_lat-64/0", Responder),
            ("mtu1500-ib_send_bw/0", Initiator),
            ("mtu1500-ib_send_bw/0", Responder),
        ],
        ours: "00144143000000000000000000000004000000003300000000000000",
        theirs: "00144143000000000000000000000004000000003300004000000000",
    },
    Difference {
        reason: "siw supports RTR by Write and Read, our engine also by Send",
        at: &[("p2p-gen", Initiator)],
        ours: "MPA rev 2 S IRD 4 ORD 4 peer-to-peer RtrKinds(SEND | WRITE | READ) private data 0",
        theirs: "MPA rev 2 S IRD 4 ORD 4 peer-to-peer RtrKinds(WRITE | READ) private data 0",
    },
    Difference {
        reason: "siw's Reply names the chosen kind, ours all supported (RFC 6581 section 9.2)",
        at: &[("p2p-gen", Responder)],
        ours: "MPA rev 2 S IRD 4 ORD 4 peer-to-peer RtrKinds(SEND | WRITE | READ) private data 16",
        theirs: "MPA rev 2 S IRD 4 ORD 4 peer-to-peer RtrKinds(WRITE) private data 16",
    },
    Difference {
        reason: "the STag of a zero-length Write is not checked; siw's is 1",
        at: &[("p2p-gen", Initiator)],
        ours: "000ec14000000000000000000000000000000000",
        theirs: "000ec14000000001000000000000000000000000",
    },
    Difference {
        reason: "our Request has revision 1 or more; siw's revision 0 differs from RDMAC's, which \
            always has Markers and CRCs (RFC 5044 appendix C)",
        at: &[("rev0-gen", Initiator)],
        ours: "MPA rev 1 private data 0",
        theirs: "MPA rev 0 private data 0",
    },
    Difference {
        reason: "our engine rejects revision 0, with a Reply of revision 1",
        at: &[("rev0-gen", Responder)],
        ours: "MPA rev 1 R private data 0",
        theirs: "MPA rev 0 private data 16",
    },
    Difference {
        reason: "siw sends before it has received an FPDU (RFC 5044 section 7.1.2 rule 4)",
        at: &[("srv-first", Responder)],
        ours: "nothing",
        theirs: "Send of 32",
    },
    Difference {
        reason: "siw ignores an STag that cannot be invalidated",
        at: &[("term-inv-bad", Responder)],
        ours: "Terminate 0/1/09 (RDMA protection: STag cannot be invalidated), segment of 26, DDP1 \
            untagged last qn 0 msn 2 mo 0 ulp stag 0x14173700",
        theirs: "nothing",
    },
    Difference {
        reason: "siw answers a Read without the access right",
        at: &[("term-read-noperm", Responder)],
        ours: "Terminate 0/1/02 (RDMA protection: access rights violation), segment of 46, DDP1 \
            untagged last qn 1 msn 1 mo 0, \
            read 64 from 0xf86a1600+0x55a26ce6a000 to 0xd4d10900+0x55d4ee566000",
        theirs: "RDMA Read Response of 64",
    },
    Difference {
        reason: LAYOUT,
        at: &[("gen-sendseinv", Responder)],
        ours: "Terminate 1/1/00 (tagged buffer: invalid STag), segment of 22, \
            DDP1 tagged last stag 0x37bc7900 to 0x564330938000",
        theirs: "Terminate 1/1/00 (tagged buffer: invalid STag), segment of 8, \
            DDP1 tagged last stag 0x37bc7900 to 0x564330938000, in siw's layout",
    },
    Difference {
        reason: "siw's layout without segment length, and the size of the Read in place of its MSN",
        at: &[("term-read-bad-stag", Responder)],
        ours: "Terminate 0/1/00 (RDMA protection: invalid STag), segment of 46, \
            DDP1 untagged last qn 1 msn 1 mo 0, \
            read 64 from 0xea859200+0x562931060000 to 0x2e0fbd00+0x555b0cd57000",
        theirs: "Terminate 0/1/00 (RDMA protection: invalid STag), segment of 0, \
            DDP1 untagged last qn 1 msn 64 mo 0, \
            read 64 from 0xea859200+0x562931060000 to 0x2e0fbd00+0x555b0cd57000, in siw's layout",
    },
    Difference {
        reason: "as for term-read-bad-stag",
        at: &[("term-read-bounds", Responder)],
        ours: "Terminate 0/1/01 (RDMA protection: base or bounds violation), segment of 46, \
            DDP1 untagged last qn 1 msn 1 mo 0, \
            read 64 from 0xcffdac00+0x55bd7e64ffdc to 0xb61ddb00+0x55bfacabe000",
        theirs: "Terminate 0/1/01 (RDMA protection: base or bounds violation), segment of 0, \
            DDP1 untagged last qn 1 msn 64 mo 0, \
            read 64 from 0xcffdac00+0x55bd7e64ffdc to 0xb61ddb00+0x55bfacabe000, in siw's layout",
    },
    Difference {
        reason: LAYOUT,
        at: &[("term-send-nobuf", Responder)],
        ours: "Terminate 1/2/02 (untagged buffer: invalid MSN, no buffer available), segment of 26, \
            DDP1 untagged last qn 0 msn 2 mo 0",
        theirs: "Terminate 1/2/02 (untagged buffer: invalid MSN, no buffer available), segment of 8, \
            DDP1 untagged last qn 0 msn 2 mo 0, in siw's layout",
    },
    Difference {
        reason: "siw's layout, and its code for a missing receive if a receive is too short",
        at: &[("term-send-toolong", Responder)],
        ours: "Terminate 1/2/05 (untagged buffer: message too long for the buffer), segment of 83, \
            DDP1 untagged last qn 0 msn 2 mo 0",
        theirs: "Terminate 1/2/02 (untagged buffer: invalid MSN, no buffer available), segment of 65, \
            DDP1 untagged last qn 0 msn 2 mo 0, in siw's layout",
    },
    Difference {
        reason: LAYOUT,
        at: &[("term-write-bad-stag", Responder)],
        ours: "Terminate 1/1/00 (tagged buffer: invalid STag), segment of 78, \
            DDP1 tagged last stag 0x1c753800 to 0x560bd16ef000",
        theirs: "Terminate 1/1/00 (tagged buffer: invalid STag), segment of 64, \
            DDP1 tagged last stag 0x1c753800 to 0x560bd16ef000, in siw's layout",
    },
    Difference {
        reason: LAYOUT,
        at: &[("term-write-bounds", Responder)],
        ours: "Terminate 1/1/01 (tagged buffer: base or bounds violation), segment of 78, \
            DDP1 tagged last stag 0x60d2e700 to 0x556dd2abbfdc",
        theirs: "Terminate 1/1/01 (tagged buffer: base or bounds violation), segment of 64, \
            DDP1 tagged last stag 0x60d2e700 to 0x556dd2abbfdc, in siw's layout",
    },
    Difference {
        reason: LAYOUT,
        at: &[("term-write-noperm", Responder)],
        ours: "Terminate 1/1/00 (tagged buffer: invalid STag), segment of 78, \
            DDP1 tagged last stag 0xc3f49900 to 0x557425a43000",
        theirs: "Terminate 1/1/00 (tagged buffer: invalid STag), segment of 64, \
            DDP1 tagged last stag 0xc3f49900 to 0x557425a43000, in siw's layout",
    },
];

/// Ends of connections that were not just closed, by the side that our engine plays: events, and
/// requests whose result differs from the recording.
pub const ENDS: &[(&str, Side, &[&str])] = &[
    ("gen-sendseinv", Initiator, &["terminated by peer 1/1/00"]),
    ("gen-sendseinv", Responder, &["terminated 1/1/00"]),
    ("reject", Initiator, &["rejected: no-thanks"]),
    ("reject", Responder, &["rejected"]),
    ("rev0-gen", Initiator, &["the peer answered with MPA revision 0, which is not supported"]),
    ("rev0-gen", Responder, &["MPA revision 0 is not supported"]),
    ("srv-first", Initiator, &["aborted"]),
    (
        "srv-first",
        Responder,
        &["never established", "unreachable: receiving failed: connection reset", "0 Send WrFlush"],
    ),
    ("term-inv-bad", Responder, &["terminated 0/1/09", "1001 Receive RemoteInvalidRequest 8"]),
    (
        "term-read-bad-stag",
        Initiator,
        &["terminated by peer 0/1/00", "1 RdmaRead RemoteAccess 0/1/00"],
    ),
    ("term-read-bad-stag", Responder, &["terminated 0/1/00"]),
    (
        "term-read-bounds",
        Initiator,
        &["terminated by peer 0/1/01", "1 RdmaRead RemoteAccess 0/1/01"],
    ),
    ("term-read-bounds", Responder, &["terminated 0/1/01"]),
    ("term-read-noperm", Responder, &["terminated 0/1/02"]),
    ("term-send-nobuf", Initiator, &["terminated by peer 1/2/02"]),
    ("term-send-nobuf", Responder, &["terminated 1/2/02", "not completed: 1001 Receive 8"]),
    ("term-send-toolong", Initiator, &["terminated by peer 1/2/02"]),
    ("term-send-toolong", Responder, &["terminated 1/2/05", "1001 Receive LocalLength 1/2/05"]),
    ("term-write-bad-stag", Initiator, &["terminated by peer 1/1/00"]),
    ("term-write-bad-stag", Responder, &["terminated 1/1/00"]),
    ("term-write-bounds", Initiator, &["terminated by peer 1/1/01"]),
    ("term-write-bounds", Responder, &["terminated 1/1/01"]),
    ("term-write-noperm", Initiator, &["terminated by peer 1/1/00"]),
    ("term-write-noperm", Responder, &["terminated 1/1/00"]),
];
